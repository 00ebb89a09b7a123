// SPDX-License-Identifier: Apache-2.0

package zds_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
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
			s, netns := serveAcks(b)
			for i := range others {
				if err := s.Add(b.Context(), pod(i), netns); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportAllocs()
			for b.Loop() {
				if err := s.Add(b.Context(), pod(others), netns); err != nil {
					b.Fatal(err)
				}
				if err := s.Del(b.Context(), pod(others).UID); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkAdd is what one Add takes while so many are under way, as when a namespace is
// switched on.
func BenchmarkAdd(b *testing.B) {
	for _, adders := range []int{1, 64} {
		b.Run(fmt.Sprintf("adders=%d", adders), func(b *testing.B) {
			s, netns := serveAcks(b)
			var work sync.WaitGroup
			b.ReportAllocs()
			b.ResetTimer()
			for adder := range adders {
				work.Go(func() {
					w := pod(adder)
					for range (b.N + adders - 1 - adder) / adders {
						w.Name += "'"
						if len(w.Name) > 20 {
							w.Name = "p"
						}
						if err := s.Add(b.Context(), w, netns); err != nil {
							b.Error(err)
						}
					}
				})
			}
			work.Wait()
		})
	}
}

// serveAcks returns a server with a proxy that acks, and some netns.
func serveAcks(b *testing.B) (*zds.Server, *os.File) {
	b.Helper()
	socket := filepath.Join(b.TempDir(), "zds.sock")
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Net: "unixpacket", Name: socket})
	if err != nil {
		b.Fatal(err)
	}
	s, err := zds.New(zds.Config{Listener: l})
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var ended sync.WaitGroup
	ended.Go(func() {
		if err := s.Run(ctx); err != nil {
			b.Error(err)
		}
	})
	b.Cleanup(func() { cancel(); ended.Wait() })
	go ackEverything(b.Context(), socket)
	netns, err := os.Open("/proc/self/ns/net")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { netns.Close() })
	return s, netns
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
