// SPDX-License-Identifier: Apache-2.0

package certfetch

import (
	"crypto/x509"
	"testing"
	"time"
)

// A clock that is set back after a rotation does not keep leaves waiting for as
// long as it was set back by.
func TestClockSetBackAfterRotation(t *testing.T) {
	root := &x509.Certificate{Raw: []byte("root")}
	f := &Fetcher{
		bundle:    Bundle{Roots: []*x509.Certificate{root}, Version: 2},
		leadUntil: wallNow().Add(time.Hour), // seen from an hour before
	}
	if wait := f.adoptRoots([]*x509.Certificate{root}, 2); wait > rootsLead {
		t.Errorf("a leaf has to wait for %v, want at most %v", wait, rootsLead)
	}
}
