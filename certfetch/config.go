// SPDX-License-Identifier: Apache-2.0

package certfetch

import (
	"errors"
	"fmt"
	"log/slog"
	"time"
)

// Defaults of [Config], and the limits of what it takes.
const (
	DefaultTTL          = 24 * time.Hour
	DefaultWorkers      = 4
	DefaultLinger       = 10 * time.Second
	DefaultIssueTimeout = 10 * time.Second

	// MinTTL leaves room for a renewal and its retries.
	MinTTL = 10 * time.Second
	// MaxWorkers bounds what a node may ask of its CA at once.
	MaxWorkers = 64
	// MaxLinger bounds how long a key may outlive the last pod that needed it.
	MaxLinger = time.Hour
	// MaxIssueTimeout is the longest that one call of the source may hold a worker.
	MaxIssueTimeout = 10 * time.Second
)

// Config says where certificates come from and how they are asked for. Zero values mean the
// defaults, except for Linger.
type Config struct {
	// Source is the CA. Required.
	Source Source
	// TTL is the lifetime asked for; the CA may grant less. Default 24 h, at least 10 s.
	TTL time.Duration
	// Workers is how many calls of the source may be under way at once. Default 4, at most 64.
	Workers int
	// Linger is how long a key is kept after the last pod of its identity went, for a rollout to
	// find it again without a CSR. Zero drops it at once; the usual value is [DefaultLinger]. At most 1 h.
	Linger time.Duration
	// IssueTimeout bounds one issuance. Default 10 s, which is also the most.
	IssueTimeout time.Duration
	// Logger gets what concerns no caller: failures, and their end. Default: discard.
	Logger *slog.Logger
}

// Validate says what is wrong with c once the defaults are in, all of it at once.
func (c Config) Validate() error {
	c = c.withDefaults()
	var errs []error
	if c.Source == nil {
		errs = append(errs, errors.New("a certificate source is required"))
	}
	if c.TTL < MinTTL {
		errs = append(errs, fmt.Errorf("certificate TTL is %s, at least %s is needed", c.TTL, MinTTL))
	}
	if c.Workers < 1 || c.Workers > MaxWorkers {
		errs = append(errs, fmt.Errorf("certificate workers are %d, must be 1 to %d", c.Workers, MaxWorkers))
	}
	if c.Linger < 0 || c.Linger > MaxLinger {
		errs = append(errs, fmt.Errorf("certificate linger is %s, must be 0 to %s", c.Linger, MaxLinger))
	}
	if c.IssueTimeout < 0 || c.IssueTimeout > MaxIssueTimeout {
		errs = append(errs, fmt.Errorf("issue timeout is %s, must be at most %s", c.IssueTimeout, MaxIssueTimeout))
	}
	return errors.Join(errs...)
}

func (c Config) withDefaults() Config {
	if c.TTL == 0 {
		c.TTL = DefaultTTL
	}
	if c.Workers == 0 {
		c.Workers = DefaultWorkers
	}
	if c.IssueTimeout == 0 {
		c.IssueTimeout = DefaultIssueTimeout
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c
}
