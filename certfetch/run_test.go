// SPDX-License-Identifier: Apache-2.0

package certfetch

import (
	"context"
	"crypto/x509"
	"errors"
	"testing"
	"time"

	"ambientd/certfetch/spiffeid"
)

// stranger is a source that must not be asked.
type stranger struct{ t *testing.T }

func (s stranger) Issue(context.Context, spiffeid.ID, []byte, time.Duration) (Issued, error) {
	s.t.Error("the CA was asked")
	return Issued{}, errors.New("asked")
}

func (s stranger) Roots(context.Context) ([]*x509.Certificate, error) {
	return nil, errors.New("asked for roots")
}

// An attempt whose identity was unregistered between its turn and its request is
// cancelled by then, and sends none.
func TestNoRequestForAnIdentityThatIsGone(t *testing.T) {
	f, err := New(Config{Source: stranger{t}})
	if err != nil {
		t.Fatal(err)
	}
	id, err := spiffeid.Parse("spiffe://cluster.local/ns/shop/sa/web")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := f.issue(ctx, &entry{id: id}); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want the context's", err)
	}
}
