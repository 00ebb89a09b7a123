// SPDX-License-Identifier: Apache-2.0

package dns

import (
	"bytes"
	"errors"
	"net"
	"strings"
	"testing"
	"time"
)

// A query for "a.bc" A IN, with recursion desired and an EDNS record.
const (
	question = "\x01a\x02bc\x00\x00\x01\x00\x01"
	query    = "\x12\x34\x01\x20\x00\x01\x00\x00\x00\x00\x00\x01" + question + "\x00\x00\x29\x10\x00\x00\x00\x00\x00\x00\x00"
	answer   = "\x12\x34\x83\x80\x00\x01\x00\x00\x00\x00\x00\x00" + question
)

func TestTruncated(t *testing.T) {
	got, err := truncated([]byte(query))
	if err != nil || string(got) != answer {
		t.Errorf("truncated = %q, %v; want %q", got, err, answer)
	}
	for name, bad := range map[string]string{
		"empty":               "",
		"header alone":        query[:12],
		"cut in the name":     query[:14],
		"cut in the class":    query[:len(query)-12],
		"an answer":           answer,
		"two questions":       strings.Replace(query, "\x00\x01\x00\x00", "\x00\x02\x00\x00", 1),
		"a compressed name":   query[:12] + "\xc0\x0c\x00\x01\x00\x01",
		"a name without end":  query[:12] + strings.Repeat("\x3f"+strings.Repeat("x", 63), 8),
		"a name past the end": query[:12] + "\x3fabc",
	} {
		if got, err := truncated([]byte(bad)); err == nil {
			t.Errorf("%s: answered with %q", name, got)
		}
	}
}

func FuzzTruncated(f *testing.F) {
	f.Add([]byte(query))
	f.Add([]byte(answer))
	f.Fuzz(func(t *testing.T, q []byte) {
		got, err := truncated(q)
		if err != nil {
			return
		}
		if len(got) > len(q) || !bytes.Equal(got[:2], q[:2]) || got[2]&(flagResponse|flagTrunc) != flagResponse|flagTrunc {
			t.Errorf("truncated(%q) = %q", q, got)
		}
		if _, err := truncated(got); err == nil {
			t.Errorf("an answer is answered: %q", got)
		}
	})
}

func TestServe(t *testing.T) {
	c, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- Serve(c) }()
	client, err := net.DialUDP("udp4", nil, c.LocalAddr().(*net.UDPAddr))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	if err := client.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	for _, packet := range []string{"nonsense", query} {
		if _, err := client.Write([]byte(packet)); err != nil {
			t.Fatal(err)
		}
	}
	buf := make([]byte, 512)
	n, err := client.Read(buf)
	if err != nil || string(buf[:n]) != answer {
		t.Errorf("got %q, %v; want %q", buf[:n], err, answer)
	}
	c.Close()
	if err := <-served; !errors.Is(err, net.ErrClosed) {
		t.Errorf("Serve = %v, want net.ErrClosed", err)
	}
}
