// SPDX-License-Identifier: Apache-2.0

package podevent

import (
	"encoding/json"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func addRequest() Request {
	return Request{
		Version: Version, Command: CommandAdd, Network: "testnet", ContainerID: "c1", IfName: "eth0",
		Pod: Pod{Namespace: "shop", Name: "cart-0", UID: "0d340c47"},
		IPs: []netip.Addr{netip.MustParseAddr("10.244.1.3"), netip.MustParseAddr("fd00::3")},
	}
}

// TestRequestJSON holds the wire's names, which another release of the plugin may have to understand.
func TestRequestJSON(t *testing.T) {
	for _, c := range []struct {
		name string
		req  Request
		want string
	}{
		{"ADD", addRequest(), `{"version":1,"command":"ADD","network":"testnet","containerID":"c1","ifName":"eth0",` +
			`"pod":{"namespace":"shop","name":"cart-0","uid":"0d340c47"},"ips":["10.244.1.3","fd00::3"]}`},
		{"GC", Request{Version: 1, Command: CommandGC, Network: "n", ValidAttachments: []Attachment{{ContainerID: "c", IfName: "i"}}},
			`{"version":1,"command":"GC","network":"n","validAttachments":[{"containerID":"c","ifName":"i"}]}`},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := json.Marshal(c.req)
			if err != nil {
				t.Fatal(err)
			}
			if string(got) != c.want {
				t.Errorf("got  %s\nwant %s", got, c.want)
			}
		})
	}
}

func TestReplyJSON(t *testing.T) {
	got, err := json.Marshal(Reply{Version: 1, Error: &Error{Code: CodeRedirection, Msg: "m", Details: "d"}})
	if err != nil {
		t.Fatal(err)
	}
	if want := `{"version":1,"error":{"code":100,"msg":"m","details":"d"}}`; string(got) != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

func TestValidate(t *testing.T) {
	del := Request{Command: CommandDel, Network: "n", ContainerID: "c", IfName: "i"}
	gc := Request{Command: CommandGC, Network: "n"}
	for _, c := range []struct {
		name   string
		req    Request
		change func(*Request)
		want   string // a part of the error; "" means valid
	}{
		{"ADD", addRequest(), func(*Request) {}, ""},
		{"ADD without addresses", addRequest(), func(r *Request) { r.IPs = nil }, ""},
		{"ADD without UID", addRequest(), func(r *Request) { r.Pod.UID = "" }, ""},
		{"ADD without pod name", addRequest(), func(r *Request) { r.Pod.Name = "" }, "namespace or name"},
		{"ADD without namespace", addRequest(), func(r *Request) { r.Pod.Namespace = "" }, "namespace or name"},
		{"ADD without container", addRequest(), func(r *Request) { r.ContainerID = "" }, "containerID"},
		{"ADD without interface", addRequest(), func(r *Request) { r.IfName = "" }, "ifName"},
		{"ADD with a list of attachments", addRequest(), func(r *Request) { r.ValidAttachments = []Attachment{{"c", "i"}} }, "only GC"},
		{"ADD with an empty address", addRequest(), func(r *Request) { r.IPs = []netip.Addr{{}} }, "ips[0]"},
		{"longest name", addRequest(), func(r *Request) { r.Pod.Name = strings.Repeat("x", maxNameLen) }, ""},
		{"too long a name", addRequest(), func(r *Request) { r.Pod.Name = strings.Repeat("x", maxNameLen+1) }, "pod.name is 513 bytes"},
		{"no network", addRequest(), func(r *Request) { r.Network = "" }, "network is empty"},
		{"unknown command", addRequest(), func(r *Request) { r.Command = "add" }, `unknown command "add"`},
		{"DEL of an unknown pod", del, func(*Request) {}, ""},
		{"GC with nothing valid", gc, func(*Request) {}, ""},
		{"GC with half an attachment", gc, func(r *Request) { r.ValidAttachments = []Attachment{{"c", "i"}, {"c", ""}} }, "validAttachments[1]"},
		{"GC of one container", gc, func(r *Request) { r.ContainerID = "c" }, "not about one attachment"},
		{"STATUS", Request{Command: CommandStatus, Network: "n"}, func(*Request) {}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.change(&c.req)
			err := c.req.Validate()
			switch {
			case c.want == "" && err != nil:
				t.Errorf("error: %v", err)
			case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
				t.Errorf("error: %v, want one with %q", err, c.want)
			}
		})
	}
}

func TestTexts(t *testing.T) {
	for _, c := range []struct{ got, want string }{
		{Pod{Namespace: "ns", Name: "p", UID: "u"}.String(), "ns/p"},
		{Pod{UID: "u"}.String(), ""},
		{(&Error{Msg: "m"}).Error(), "m"},
		{(&Error{Msg: "m", Details: "d"}).Error(), "m; d"},
		{(&VersionError{Got: 2, Want: 1}).Error(), "the message has version 2, version 1 is spoken here"},
		{DefaultSocket, "/run/ambientd/private/cni.sock"},
	} {
		if c.got != c.want {
			t.Errorf("got %q, want %q", c.got, c.want)
		}
	}
	if diff := cmp.Diff(Attachment{"c1", "eth0"}, addRequest().Attachment()); diff != "" {
		t.Error(diff)
	}
}
