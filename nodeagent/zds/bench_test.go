// SPDX-License-Identifier: Apache-2.0

package zds_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"testing"

	"ambientd/nodeagent/zds"
	"ambientd/nodeagent/zds/packet"
	"ambientd/nodeagent/zds/zdspb"
	"ambientd/nodeagent/zds/zdstest"
)

// BenchmarkAddDel is one pod coming and going, while others stay: their number
// must not matter. The proxy here does nothing but answer.
func BenchmarkAddDel(b *testing.B) {
	for _, others := range []int{10, 1000} {
		b.Run(fmt.Sprintf("others=%d", others), func(b *testing.B) {
			ctx := b.Context()
			socket := filepath.Join(b.TempDir(), "zds.sock")
			l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Net: "unixpacket", Name: socket})
			if err != nil {
				b.Fatal(err)
			}
			s, err := zds.New(zds.Config{Listener: l})
			if err != nil {
				b.Fatal(err)
			}
			runCtx, cancel := context.WithCancel(ctx)
			defer cancel()
			go s.Run(runCtx)
			go ackEverything(ctx, socket)
			netns, err := os.Open("/proc/self/ns/net")
			if err != nil {
				b.Fatal(err)
			}
			defer netns.Close()
			for i := range others {
				if err := s.Add(ctx, pod(i), netns); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportAllocs()
			for b.Loop() {
				if err := s.Add(ctx, pod(others), netns); err != nil {
					b.Fatal(err)
				}
				if err := s.Del(ctx, pod(others).UID); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// ackEverything is a proxy without a memory, so that it costs little.
func ackEverything(ctx context.Context, socket string) {
	conn, err := zdstest.DialRaw(ctx, socket)
	if err != nil {
		return
	}
	defer conn.Close()
	err = zdstest.Send(conn, &zdspb.ZdsHello{Version: zdspb.Version_V1})
	for err == nil {
		var file *os.File
		_, file, err = packet.Read(conn)
		if file != nil {
			file.Close()
		}
		if err == nil {
			err = zdstest.SendAnswer(conn, "")
		}
	}
}
