// SPDX-License-Identifier: Apache-2.0

package spiffeid_test

import (
	"encoding/json"
	"net/url"
	"strings"
	"testing"

	"ambientd/certfetch/spiffeid"
)

func trustDomain(t testing.TB, s string) spiffeid.TrustDomain {
	t.Helper()
	td, err := spiffeid.ParseTrustDomain(s)
	if err != nil {
		t.Fatal(err)
	}
	return td
}

func TestParseTakesTheIDApart(t *testing.T) {
	label63, name253 := strings.Repeat("a", 63), strings.Repeat("a.", 126)+"b"
	for _, test := range []struct{ td, namespace, account string }{
		{"cluster.local", "default", "default"},
		{"example.org", "shop", "cart.checkout-v2"},
		{"td", "ns", "sa"},
		{"td", "sa", "ns"}, // names that look like marks
		{"td", "0", "9"},
		{"a_b-c.d", "team-1", "a--b"},
		{name253, label63, name253},
	} {
		text := "spiffe://" + test.td + "/ns/" + test.namespace + "/sa/" + test.account
		id, err := spiffeid.Parse(text)
		if err != nil {
			t.Errorf("Parse(%q): %v", text, err)
			continue
		}
		if id.String() != text || id.TrustDomain().String() != test.td ||
			id.Namespace() != test.namespace || id.ServiceAccount() != test.account {
			t.Errorf("Parse(%q) = %q: %q %q %q", text, id, id.TrustDomain(), id.Namespace(), id.ServiceAccount())
		}
		made, err := spiffeid.New(trustDomain(t, test.td), test.namespace, test.account)
		if err != nil || made != id {
			t.Errorf("New(%q, %q, %q) = %q, %v; want %q", test.td, test.namespace, test.account, made, err, id)
		}
	}
}

func TestLongestIDIsMaxLength(t *testing.T) {
	name253 := strings.Repeat("a.", 126) + "b"
	id, err := spiffeid.New(trustDomain(t, name253), strings.Repeat("n", 63), name253)
	if err != nil {
		t.Fatal(err)
	}
	if got := len(id.String()); got != spiffeid.MaxLength {
		t.Errorf("the longest ID has %d bytes, MaxLength says %d", got, spiffeid.MaxLength)
	}
	if _, err := spiffeid.Parse(id.String()); err != nil {
		t.Errorf("Parse of the longest ID: %v", err)
	}
}

// Hostile identity strings: case 17 among others. None may parse, and none may come back whole in
// an error message that goes to a log.
func TestParseRefusesHostileStrings(t *testing.T) {
	for name, text := range map[string]string{
		"empty":                        "",
		"no scheme":                    "cluster.local/ns/a/sa/b",
		"another scheme":               "https://cluster.local/ns/a/sa/b",
		"upper case scheme":            "SPIFFE://cluster.local/ns/a/sa/b",
		"one slash":                    "spiffe:/cluster.local/ns/a/sa/b",
		"empty trust domain":           "spiffe:///ns/a/sa/b",
		"only the trust domain":        "spiffe://cluster.local",
		"root path":                    "spiffe://cluster.local/",
		"upper case trust domain":      "spiffe://Cluster.local/ns/a/sa/b",
		"port":                         "spiffe://cluster.local:80/ns/a/sa/b",
		"user info":                    "spiffe://me@cluster.local/ns/a/sa/b",
		"trailing dot":                 "spiffe://cluster.local./ns/a/sa/b",
		"leading dot":                  "spiffe://.cluster.local/ns/a/sa/b",
		"two dots":                     "spiffe://cluster..local/ns/a/sa/b",
		"comma in the trust domain":    "spiffe://a,b/ns/a/sa/b",
		"long label in trust domain":   "spiffe://" + strings.Repeat("a", 64) + "/ns/a/sa/b",
		"long trust domain":            "spiffe://" + strings.Repeat("a.", 127) + "b/ns/a/sa/b",
		"comma":                        "spiffe://cluster.local/ns/a/sa/b,spiffe://cluster.local/ns/c/sa/d",
		"percent-encoded slash":        "spiffe://cluster.local/ns/a%2fsa%2fadmin/sa/b",
		"percent-encoded slash at end": "spiffe://cluster.local/ns/a/sa/b%2fc",
		"percent-encoded letter":       "spiffe://cluster.local/ns/a/sa/%62",
		"NUL":                          "spiffe://cluster.local/ns/a/sa/b\x00",
		"NUL inside":                   "spiffe://cluster.local/ns/a\x00/sa/b",
		"newline":                      "spiffe://cluster.local/ns/a/sa/b\n",
		"space":                        " spiffe://cluster.local/ns/a/sa/b",
		"upper case namespace":         "spiffe://cluster.local/ns/A/sa/b",
		"upper case account":           "spiffe://cluster.local/ns/a/sa/B",
		"upper case mark":              "spiffe://cluster.local/NS/a/sa/b",
		"extra segment":                "spiffe://cluster.local/ns/a/sa/b/c",
		"segment before":               "spiffe://cluster.local/x/ns/a/sa/b",
		"trailing slash":               "spiffe://cluster.local/ns/a/sa/b/",
		"double slash":                 "spiffe://cluster.local//ns/a/sa/b",
		"empty namespace":              "spiffe://cluster.local/ns//sa/b",
		"empty account":                "spiffe://cluster.local/ns/a/sa/",
		"no account":                   "spiffe://cluster.local/ns/a/sa",
		"no namespace":                 "spiffe://cluster.local/sa/b",
		"marks swapped":                "spiffe://cluster.local/sa/b/ns/a",
		"dot segments":                 "spiffe://cluster.local/ns/../sa/b",
		"dot segment":                  "spiffe://cluster.local/ns/a/sa/.",
		"dot in the namespace":         "spiffe://cluster.local/ns/a.b/sa/c",
		"underscore":                   "spiffe://cluster.local/ns/a_b/sa/c",
		"leading hyphen":               "spiffe://cluster.local/ns/-a/sa/b",
		"trailing hyphen":              "spiffe://cluster.local/ns/a-/sa/b",
		"hyphen next to a dot":         "spiffe://cluster.local/ns/a/sa/b.-c",
		"empty label":                  "spiffe://cluster.local/ns/a/sa/b..c",
		"long namespace":               "spiffe://cluster.local/ns/" + strings.Repeat("a", 64) + "/sa/b",
		"long account":                 "spiffe://cluster.local/ns/a/sa/" + strings.Repeat("a", 254),
		"query":                        "spiffe://cluster.local/ns/a/sa/b?c",
		"fragment":                     "spiffe://cluster.local/ns/a/sa/b#c",
		"a look-alike letter":          "spiffe://cluster.local/ns/\u0430/sa/b",
		"broken UTF-8":                 "spiffe://cluster.local/ns/\xff/sa/b",
		"5,000 characters":             "spiffe://cluster.local/ns/a/sa/" + strings.Repeat("b", 5000),
	} {
		t.Run(name, func(t *testing.T) {
			id, err := spiffeid.Parse(text)
			if err == nil {
				t.Fatalf("Parse(%q) = %q, want an error", text, id)
			}
			if !id.IsZero() {
				t.Errorf("Parse(%q) returned an ID with its error: %q", text, id)
			}
			if message := err.Error(); len(message) > 700 || strings.ContainsAny(message, "\x00\n") {
				t.Errorf("the error is not fit for a log: %q", message)
			}
		})
	}
}

func TestParseTrustDomainTakesABareName(t *testing.T) {
	for _, text := range []string{"cluster.local", "td", "a_b", "1.2.3.4", strings.Repeat("a.", 126) + "b"} {
		td, err := spiffeid.ParseTrustDomain(text)
		if err != nil || td.String() != text || td.IsZero() || td.URL().String() != "spiffe://"+text {
			t.Errorf("ParseTrustDomain(%q) = %q, %v", text, td, err)
		}
	}
	for _, text := range []string{"", ".", "a.", ".a", "spiffe://a", "a/b", "A", "a b", "a:1", "ä", "*", strings.Repeat("a", 64), strings.Repeat("a", 5000)} {
		if td, err := spiffeid.ParseTrustDomain(text); err == nil || !td.IsZero() {
			t.Errorf("ParseTrustDomain(%q) = %q, %v; want an error", text, td, err)
		}
	}
}

func TestNewRefusesNamesThatAreNone(t *testing.T) {
	td := trustDomain(t, "cluster.local")
	for _, test := range []struct {
		td                 spiffeid.TrustDomain
		namespace, account string
	}{
		{spiffeid.TrustDomain{}, "a", "b"},
		{td, "", "b"},
		{td, "a", ""},
		{td, "a/sa/b", "c"},
		{td, "a", "b/c"},
		{td, "A", "b"},
		{td, "a", strings.Repeat("b", 5000)},
	} {
		if id, err := spiffeid.New(test.td, test.namespace, test.account); err == nil || !id.IsZero() {
			t.Errorf("New(%q, %q, %.20q) = %q, %v; want an error", test.td, test.namespace, test.account, id, err)
		}
	}
}

func TestZeroValueIsNoIdentity(t *testing.T) {
	var id spiffeid.ID
	if !id.IsZero() || !id.TrustDomain().IsZero() || id.String()+id.Namespace()+id.ServiceAccount()+id.URL().String() != "" {
		t.Errorf("the zero ID is not empty: %+v", id)
	}
	if text, err := id.MarshalText(); err == nil {
		t.Errorf("MarshalText of the zero ID = %q, want an error", text)
	}
	if san := id.SubjectAltName(); len(san.Value) != 0 {
		t.Errorf("SubjectAltName of the zero ID = %x, want nothing", san.Value)
	}
}

func TestTextFormIsTheIDItself(t *testing.T) {
	const text = "spiffe://cluster.local/ns/a/sa/b"
	var in map[spiffeid.ID]int
	if err := json.Unmarshal([]byte(`{"`+text+`":1}`), &in); err != nil {
		t.Fatal(err)
	}
	id, err := spiffeid.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	if in[id] != 1 {
		t.Errorf("decoded %v, want %q: 1", in, text)
	}
	out, err := json.Marshal(in)
	if err != nil || string(out) != `{"`+text+`":1}` {
		t.Errorf("encoded %s, %v", out, err)
	}
	for _, bad := range []string{"", "spiffe://cluster.local", strings.Repeat("a", 1<<20)} {
		was := id
		if err := id.UnmarshalText([]byte(bad)); err == nil || id != was {
			t.Errorf("UnmarshalText(%.30q) = %v and left %q; want an error and no change", bad, err, id)
		}
	}
}

func TestAccessorsDoNotAllocate(t *testing.T) {
	id, err := spiffeid.Parse("spiffe://cluster.local/ns/default/sa/default")
	if err != nil {
		t.Fatal(err)
	}
	var length int
	if n := testing.AllocsPerRun(100, func() {
		length += len(id.String()) + len(id.Namespace()) + len(id.ServiceAccount()) + len(id.TrustDomain().String())
	}); n != 0 {
		t.Errorf("%v allocations, want none", n)
	}
	if n := testing.AllocsPerRun(100, func() { _, err = spiffeid.Parse(id.String()) }); n != 0 || err != nil {
		t.Errorf("Parse of a valid ID: %v allocations, %v; want none", n, err)
	}
}

func TestURLIsTheCallersOwn(t *testing.T) {
	id, err := spiffeid.Parse("spiffe://cluster.local/ns/a/sa/b")
	if err != nil {
		t.Fatal(err)
	}
	changed := id.URL()
	changed.Path = "/ns/a/sa/admin"
	want := &url.URL{Scheme: "spiffe", Host: "cluster.local", Path: "/ns/a/sa/b"}
	if got := id.URL(); *got != *want {
		t.Errorf("URL() = %+v, want %+v", got, want)
	}
}
