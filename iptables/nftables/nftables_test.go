// SPDX-License-Identifier: Apache-2.0

package nftables_test

import (
	"os"
	"os/exec"
	"testing"
	"time"

	"ambientd/iptables/nftables"
	"ambientd/iptables/redirection"
	"ambientd/tools/netnstest"
)

func TestMain(m *testing.M) { os.Exit(netnstest.Main(m)) }

func TestX(t *testing.T) {
	b, err := nftables.New()
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		ns := netnstest.New(t)
		o := redirection.DefaultOptions()
		o.RerouteInterfaces = []string{"tap0"}
		ctx := t.Context()
		st := time.Now()
		f, err := b.Apply(ctx, ns.Runner(), o)
		t.Log(f, err, time.Since(st))
		st = time.Now()
		f, d, err := b.Verify(ctx, ns.Runner(), o)
		t.Log(f, d, err, time.Since(st))
		st = time.Now()
		f, d, err = b.Verify(ctx, ns.Runner(), o)
		t.Log(f, d, err, time.Since(st))
		st = time.Now()
		f, err = b.Apply(ctx, ns.Runner(), o)
		t.Log(f, err, time.Since(st))
		ns.Do(t, func() error {
			out, err := exec.Command("nft", "-a", "list", "ruleset").CombinedOutput()
			t.Log(string(out))
			return err
		})
		st = time.Now()
		err = b.Remove(ctx, ns.Runner())
		t.Log(err, time.Since(st))
	}
}
