// SPDX-License-Identifier: Apache-2.0

package spiffeid_test

import (
	"net/url"
	"regexp"
	"testing"

	"ambientd/certfetch/spiffeid"
)

// FuzzParse holds the parser against a second, slower statement of the same grammar, and what it
// accepts against url.Parse, whose reading a peer may go by: the two must see the same host and
// path, without a query, fragment, user or port.
// The seed corpus is in testdata/fuzz/FuzzParse.
func FuzzParse(f *testing.F) {
	f.Add("spiffe://cluster.local/ns/default/sa/default")
	label := `[a-z0-9](?:[-a-z0-9]*[a-z0-9])?`
	grammar := regexp.MustCompile(`\Aspiffe://([a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*)/ns/(` + label + `)/sa/(` + label + `(?:\.` + label + `)*)\z`)

	f.Fuzz(func(t *testing.T, text string) {
		id, err := spiffeid.Parse(text)
		parts := grammar.FindStringSubmatch(text)
		want := parts != nil && len(parts[1]) <= 253 && len(parts[2]) <= 63 && len(parts[3]) <= 253
		if (err == nil) != want {
			t.Fatalf("Parse(%q): error %v; the grammar says valid is %v", text, err, want)
		}
		if err != nil {
			if !id.IsZero() || err.Error() == "" {
				t.Fatalf("Parse(%q) = %q with error %q", text, id, err)
			}
			return
		}
		if id.String() != text || len(text) > spiffeid.MaxLength {
			t.Fatalf("Parse(%q) reads back %q", text, id)
		}
		if id.TrustDomain().String() != parts[1] || id.Namespace() != parts[2] || id.ServiceAccount() != parts[3] {
			t.Fatalf("Parse(%q) took it apart as %q %q %q", text, id.TrustDomain(), id.Namespace(), id.ServiceAccount())
		}
		made, err := spiffeid.New(id.TrustDomain(), id.Namespace(), id.ServiceAccount())
		if err != nil || made != id {
			t.Fatalf("New of the parts of %q = %q, %v", text, made, err)
		}
		read, err := url.Parse(text)
		if err != nil || *read != *id.URL() || read.String() != text {
			t.Fatalf("url.Parse(%q) = %#v, %v; want %#v", text, read, err, id.URL())
		}
	})
}
