// SPDX-License-Identifier: Apache-2.0

package certfetch_test

import (
	"strings"
	"testing"
	"time"

	"ambientd/certfetch"
	"ambientd/certfetch/catest"
)

func TestConfigNamesWhatIsWrong(t *testing.T) {
	source := catest.New(t)
	for name, test := range map[string]struct {
		cfg  certfetch.Config
		want string
	}{
		"no source":         {certfetch.Config{}, "source"},
		"short TTL":         {certfetch.Config{Source: source, TTL: time.Second}, "TTL is 1s"},
		"negative TTL":      {certfetch.Config{Source: source, TTL: -1}, "TTL"},
		"negative workers":  {certfetch.Config{Source: source, Workers: -1}, "workers are -1"},
		"many workers":      {certfetch.Config{Source: source, Workers: 65}, "workers are 65"},
		"negative linger":   {certfetch.Config{Source: source, Linger: -1}, "linger"},
		"long linger":       {certfetch.Config{Source: source, Linger: 2 * time.Hour}, "linger is 2h"},
		"long timeout":      {certfetch.Config{Source: source, IssueTimeout: 11 * time.Second}, "timeout is 11s"},
		"negative timeout":  {certfetch.Config{Source: source, IssueTimeout: -1}, "timeout"},
		"all of it at once": {certfetch.Config{TTL: 1, Workers: 99}, "source"},
	} {
		_, err := certfetch.New(test.cfg)
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: New = %v, want an error with %q", name, err, test.want)
		}
	}
	if err := (certfetch.Config{TTL: 1, Workers: 99}).Validate(); strings.Count(err.Error(), "\n") != 2 {
		t.Errorf("Validate = %v, want three complaints", err)
	}
	if _, err := certfetch.New(certfetch.Config{Source: source}); err != nil {
		t.Errorf("with defaults: %v", err)
	}
}
