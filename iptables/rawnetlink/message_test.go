// SPDX-License-Identifier: Apache-2.0

package rawnetlink

import (
	"bytes"
	"encoding/binary"
	"errors"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestMessageRoundTrip(t *testing.T) {
	want := []Message{
		{Type: 7, Flags: unix.NLM_F_REQUEST, Sequence: 1, Payload: []byte{1, 2, 3, 4}},
		{Type: 8, Flags: unix.NLM_F_DUMP, Sequence: 2},
	}
	var datagram []byte
	for _, m := range want {
		datagram = AppendMessage(datagram, m)
	}
	for _, w := range want {
		got, rest, err := Next(datagram)
		if err != nil {
			t.Fatal(err)
		}
		if got.Type != w.Type || got.Flags != w.Flags || got.Sequence != w.Sequence || !bytes.Equal(got.Payload, w.Payload) {
			t.Errorf("got %+v, want %+v", got, w)
		}
		datagram = rest
	}
	if len(datagram) > 0 {
		t.Errorf("%d bytes left", len(datagram))
	}
}

func TestAttributePadding(t *testing.T) {
	want := []Attribute{{Type: 1, Data: []byte("a\x00")}, {Type: 2}, {Type: 3, Data: []byte("abcde")}}
	var b []byte
	for _, a := range want {
		b = AppendAttribute(b, a)
		if len(b)%4 != 0 {
			t.Errorf("%d bytes after attribute %d", len(b), a.Type)
		}
	}
	for _, w := range want {
		got, rest, err := NextAttribute(b)
		if err != nil {
			t.Fatal(err)
		}
		if got.Type != w.Type || !bytes.Equal(got.Data, w.Data) {
			t.Errorf("got %+v, want %+v", got, w)
		}
		b = rest
	}
}

func TestAttributeTypeWithoutFlags(t *testing.T) {
	b := AppendAttribute(nil, Attribute{Type: unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER | 5})
	a, _, err := NextAttribute(b)
	if err != nil || a.Type != 5 {
		t.Errorf("type %d, error %v; want 5", a.Type, err)
	}
}

func TestBrokenFraming(t *testing.T) {
	short := AppendMessage(nil, Message{Payload: []byte{1, 2, 3, 4}})
	for name, b := range map[string][]byte{
		"no header":   short[:8],
		"cut off":     short[:18],
		"length 0":    make([]byte, 16),
		"length 2^32": bytes.Repeat([]byte{0xff}, 16),
	} {
		if _, _, err := Next(b); err == nil {
			t.Errorf("message, %s: no error", name)
		}
	}
	for name, b := range map[string][]byte{
		"no header": {4, 0},
		"cut off":   {8, 0, 1, 0},
		"length 0":  {0, 0, 1, 0},
	} {
		if _, _, err := NextAttribute(b); err == nil {
			t.Errorf("attribute, %s: no error", name)
		}
	}
}

// answer returns a message whose payload begins with an error number, negated as the kernel does it.
func answer(kind uint16, errno unix.Errno, flags uint16) []byte {
	return AppendMessage(nil, Message{
		Type: kind, Flags: flags, Sequence: 9, Payload: binary.NativeEndian.AppendUint32(nil, uint32(-int32(errno))),
	})
}

func TestFailure(t *testing.T) {
	for _, test := range []struct {
		name     string
		datagram []byte
		want     error
	}{
		{"acknowledgement", answer(unix.NLMSG_ERROR, 0, 0), nil},
		{"refusal", answer(unix.NLMSG_ERROR, unix.EPERM, 0), unix.EPERM},
		{"dump ended well", answer(unix.NLMSG_DONE, 0, 0), nil},
		{"dump failed", answer(unix.NLMSG_DONE, unix.ENOENT, 0), unix.ENOENT},
		{"data", answer(unix.RTM_NEWLINK, unix.EPERM, 0), nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			m, _, err := Next(test.datagram)
			if err != nil {
				t.Fatal(err)
			}
			err = m.Failure()
			if !errors.Is(err, test.want) {
				t.Fatalf("got %v, want %v", err, test.want)
			}
			var refusal Error
			if test.want != nil && (!errors.As(err, &refusal) || refusal.Sequence != 9) {
				t.Errorf("got %#v, want an Error of message 9", err)
			}
		})
	}
	if err := (Message{Type: unix.NLMSG_ERROR}).Failure(); err == nil || !strings.Contains(err.Error(), "no error number") {
		t.Errorf("NLMSG_ERROR without a payload: %v", err)
	}
}

func TestScan(t *testing.T) {
	data := AppendMessage(nil, Message{Type: unix.RTM_NEWLINK, Payload: make([]byte, 20)})
	interrupted := AppendMessage(nil, Message{Type: unix.RTM_NEWLINK, Flags: unix.NLM_F_DUMP_INTR})
	done := answer(unix.NLMSG_DONE, 0, unix.NLM_F_MULTI)
	for _, test := range []struct {
		name     string
		datagram []byte
		want     dumpPart
	}{
		{"more to come", bytes.Join([][]byte{data, data}, nil), dumpPart{length: len(data)}},
		{"end", done, dumpPart{done: true}},
		{"end after data", bytes.Join([][]byte{data, done}, nil), dumpPart{done: true, length: len(data)}},
		{"interrupted", bytes.Join([][]byte{interrupted, data}, nil), dumpPart{interrupted: true, length: len(interrupted)}},
		{"interrupted at the end", answer(unix.NLMSG_DONE, 0, unix.NLM_F_DUMP_INTR), dumpPart{interrupted: true, done: true}},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := scan(test.datagram)
			if err != nil || got != test.want {
				t.Errorf("got %+v, %v; want %+v", got, err, test.want)
			}
		})
	}
	if _, err := scan(answer(unix.NLMSG_ERROR, unix.EBUSY, 0)); !errors.Is(err, unix.EBUSY) {
		t.Errorf("refused dump: %v", err)
	}
}

// FuzzNext feeds arbitrary bytes to both parsers: no panic, no endless loop, nothing outside of the input.
func FuzzNext(f *testing.F) {
	f.Add(AppendMessage(nil, Message{Type: 1, Payload: AppendAttribute(nil, Attribute{Type: 2, Data: []byte("abc")})}))
	f.Add(answer(unix.NLMSG_ERROR, unix.EPERM, 0))
	f.Fuzz(func(t *testing.T, datagram []byte) {
		for rest := datagram; len(rest) > 0; {
			m, after, err := Next(rest)
			if err != nil {
				break
			}
			if len(after) >= len(rest) || len(m.Payload) > len(rest) {
				t.Fatalf("no progress: %d bytes before, %d after", len(rest), len(after))
			}
			for attributes := m.Payload; len(attributes) > 0; {
				_, behind, err := NextAttribute(attributes)
				if err != nil {
					break
				}
				if len(behind) >= len(attributes) {
					t.Fatalf("no progress: %d bytes before, %d after", len(attributes), len(behind))
				}
				attributes = behind
			}
			rest = after
		}
		if part, err := scan(datagram); err == nil && part.length > len(datagram) {
			t.Fatalf("length %d of %d bytes", part.length, len(datagram))
		}
	})
}
