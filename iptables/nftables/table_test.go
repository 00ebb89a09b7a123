// SPDX-License-Identifier: Apache-2.0

package nftables

import (
	"bytes"
	"reflect"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"ambientd/iptables/rawnetlink"
	"ambientd/iptables/redirection"
)

// rulesOf returns a rule for each letter.
func rulesOf(letters string) []rule {
	var rules []rule
	for _, letter := range letters {
		rules = append(rules, rule{comment: "row", expressions: string(letter)})
	}
	return rules
}

func TestEdits(t *testing.T) {
	for _, test := range []struct{ want, got, edits string }{
		{"abc", "abc", ""},
		{"abc", "ac", "-b"},
		{"abc", "axbc", "+x"},
		{"abc", "", "-a -b -c"},
		{"", "ab", "+a +b"},
		{"abc", "axc", "-b +x"},
		{"abc", "bca", "-a +a"},
		{"aabb", "ab", "-a -b"},
	} {
		var edited []string
		for _, e := range edits(rulesOf(test.want), rulesOf(test.got)) {
			if e.want != "" {
				edited = append(edited, "-"+strings.TrimPrefix(e.want, "row, "))
			} else {
				edited = append(edited, "+"+strings.TrimPrefix(e.got, "row, "))
			}
		}
		if got := strings.Join(edited, " "); got != test.edits {
			t.Errorf("from %q to %q: %q, want %q", test.want, test.got, got, test.edits)
		}
	}
}

// nested, integer and word build attributes as the kernel reports them.
func nested(kind uint16, attributes ...[]byte) []byte {
	return appendNested(nil, kind, bytes.Join(attributes, nil))
}

func integer(kind uint16, value uint32) []byte {
	return rawnetlink.AppendAttribute(nil, number(kind, value))
}

func word(kind uint16, value string) []byte { return appendText(nil, kind, value) }

// element is one expression of a rule's list.
func element(name string, attributes ...[]byte) []byte {
	return nested(unix.NFTA_LIST_ELEM, word(unix.NFTA_EXPR_NAME, name), nested(unix.NFTA_EXPR_DATA, attributes...))
}

// TestDescribeExpressions has what damage may bring that our own rules do not hold.
func TestDescribeExpressions(t *testing.T) {
	verdict := func(code int32, chain ...[]byte) []byte {
		return nested(unix.NFTA_IMMEDIATE_DATA, nested(unix.NFTA_DATA_VERDICT,
			append([][]byte{integer(unix.NFTA_VERDICT_CODE, uint32(code))}, chain...)...))
	}
	for _, test := range []struct {
		name string
		list []byte
		want string
	}{
		{"drop", element("immediate", integer(unix.NFTA_IMMEDIATE_DREG, 0), verdict(0)), "[ immediate reg 0 verdict drop ]"},
		{"return", element("immediate", verdict(unix.NFT_RETURN)), "[ immediate reg 0 verdict return ]"},
		{"jump", element("immediate", verdict(unix.NFT_JUMP, word(unix.NFTA_VERDICT_CHAIN, "c"))), "[ immediate reg 0 verdict jump c ]"},
		{"goto", element("immediate", verdict(unix.NFT_GOTO, word(unix.NFTA_VERDICT_CHAIN, "c"))), "[ immediate reg 0 verdict goto c ]"},
		{"queue", element("immediate", verdict(3)), "[ immediate reg 0 verdict code 3 ]"},
		{"unknown expression", element("quota", integer(2, 7)), "[ quota attribute2=0x00000007 ]"},
		{"unset attribute of a newer kernel", element("meta", integer(unix.NFTA_META_KEY, unix.NFT_META_MARK), integer(99, 0)), "[ meta load mark => reg 0 ]"},
		{"set one", element("meta", integer(unix.NFTA_META_KEY, 200), integer(99, 1)), "[ meta load key 200 => reg 0 attribute99=0x00000001 ]"},
		{"other keys", element("ct", integer(unix.NFTA_CT_KEY, 0), integer(unix.NFTA_CT_SREG, 1)), "[ ct set key 0 with reg 1 ]"},
		{"other base", element("payload", integer(unix.NFTA_PAYLOAD_BASE, 0)), "[ payload load 0b @ base 0 + 0 => reg 0 ]"},
		{"less than", element("cmp", integer(unix.NFTA_CMP_OP, unix.NFT_CMP_LT)), "[ cmp op 2 reg 0 0x ]"},
		{"no attributes", nested(unix.NFTA_LIST_ELEM), "[  ]"},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := describeExpressions(test.list)
			if err != nil || got != test.want {
				t.Errorf("got %q, %v; want %q", got, err, test.want)
			}
		})
	}
}

func TestComment(t *testing.T) {
	for _, test := range []struct {
		data []byte
		want string
	}{
		{nil, "a rule"},
		{[]byte{0, 4, 'r', 'o', 'w', 0}, "row"},
		{[]byte{1, 1, 7, 0, 2, 'x', 0}, "x"},
		{[]byte{0, 9, 'c', 'u', 't'}, "a rule"},
	} {
		if got := comment(test.data); got != test.want {
			t.Errorf("%v: got %q, want %q", test.data, got, test.want)
		}
	}
}

func TestSightings(t *testing.T) {
	var s sightings
	a, b := &ruleSet{}, &ruleSet{}
	if _, known := s.last(1); known || s.holds(1, 0, nil) {
		t.Error("something is known at the beginning")
	}
	s.record(1, sighting{generation: 10, set: a})
	for _, test := range []struct {
		name       string
		cookie     uint64
		generation uint32
		set        *ruleSet
		want       bool
	}{
		{"as recorded", 1, 10, a, true},
		{"another generation", 1, 11, a, false},
		{"another rule set", 1, 10, b, false},
		{"another namespace", 2, 10, a, false},
	} {
		if got := s.holds(test.cookie, test.generation, test.set); got != test.want {
			t.Errorf("%s: %t", test.name, got)
		}
	}
	s.forget(1)
	if s.holds(1, 10, a) {
		t.Error("not forgotten")
	}
	for cookie := range uint64(3 * maxSightings) {
		s.record(cookie, sighting{generation: 1, set: a})
		if len(s.seen) > maxSightings || !s.holds(cookie, 1, a) {
			t.Fatalf("%d namespaces held", len(s.seen))
		}
	}
}

func TestCacheIsBounded(t *testing.T) {
	var c cache
	v := variants()["default"]
	first, err := c.get(v.options, v.families)
	if err != nil {
		t.Fatal(err)
	}
	again, err := c.get(v.options, v.families)
	if err != nil || again != first {
		t.Errorf("encoded again: %v", err)
	}
	other, err := c.get(v.options, 1)
	if err != nil || other == first {
		t.Errorf("the same rule set for another family: %v", err)
	}
	for i := range maxRuleSets + 10 {
		v.options.RerouteInterfaces = []string{"tap" + string(rune('a'+i%26)) + string(rune('a'+i/26))}
		if _, err := c.get(v.options, 1); err != nil {
			t.Fatal(err)
		}
		if len(c.sets) > maxRuleSets {
			t.Fatalf("%d rule sets held", len(c.sets))
		}
	}
}

// TestReportEquality changes one thing at a time in what a kernel might report.
func TestReportEquality(t *testing.T) {
	message := func(kind uint16, generation byte, attributes ...[]byte) []byte {
		payload := []byte{unix.NFPROTO_INET, 0, 0, generation}
		for _, a := range attributes {
			payload = append(payload, a...)
		}
		return rawnetlink.AppendMessage(nil, rawnetlink.Message{Type: messageType(kind), Payload: payload})
	}
	const tableHandle = 4 // NFTA_TABLE_HANDLE
	table := func(flags, handle uint32) []byte {
		return message(unix.NFT_MSG_NEWTABLE, 1, word(unix.NFTA_TABLE_NAME, "ambientd"), integer(unix.NFTA_TABLE_FLAGS, flags), integer(tableHandle, handle))
	}
	chain := func(table, name string, generation byte) []byte {
		return message(unix.NFT_MSG_NEWCHAIN, generation, word(unix.NFTA_CHAIN_TABLE, table), word(unix.NFTA_CHAIN_NAME, name))
	}
	join := func(parts ...[]byte) (all []byte) {
		for _, p := range parts {
			all = append(all, p...)
		}
		return all
	}
	base := report{objects: join(table(0, 1), chain("ambientd", "a", 1))}
	for _, test := range []struct {
		name  string
		other report
		want  bool
	}{
		{"itself", base, true},
		{"another table handle", report{objects: join(table(0, 2), chain("ambientd", "a", 1))}, true},
		{"another generation", report{objects: join(table(0, 1), chain("ambientd", "a", 2))}, true},
		{"a foreign chain too", report{objects: join(table(0, 1), chain("foreign", "x", 1), chain("ambientd", "a", 1))}, true},
		{"dormant", report{objects: join(table(1, 1), chain("ambientd", "a", 1))}, false},
		{"another chain", report{objects: join(table(0, 1), chain("ambientd", "b", 1))}, false},
		{"one chain more", report{objects: join(base.objects, chain("ambientd", "b", 1))}, false},
		{"one chain less", report{objects: table(0, 1)}, false},
		{"rules", report{objects: base.objects, rules: message(unix.NFT_MSG_NEWRULE, 1, word(unix.NFTA_RULE_TABLE, "ambientd"))}, false},
		{"broken", report{objects: base.objects[:len(base.objects)-3]}, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got := base.equal(test.other); got != test.want {
				t.Errorf("equal: %t, want %t", got, test.want)
			}
			if got := test.other.equal(base); got != test.want {
				t.Errorf("the other way round: %t, want %t", got, test.want)
			}
		})
	}
	if !sameGeneration(base.objects, base.rules) {
		t.Error("one generation is taken for two")
	}
	if sameGeneration(table(0, 1), chain("ambientd", "a", 2)) {
		t.Error("two generations are taken for one")
	}
}

// FuzzDecode feeds arbitrary messages to what reads the kernel's reports. It may refuse; what it takes must compare equal
// to itself.
func FuzzDecode(f *testing.F) {
	f.Add(newSet(f, variants()["default"]).replacement.bytes)
	f.Add(newSet(f, variants()["reroute"]).creation.bytes)
	want := newSet(f, variants()["default"]).want
	f.Fuzz(func(t *testing.T, messages []byte) {
		got, err := decode(redirection.NFTablesTable, messages)
		if err != nil {
			return
		}
		again, err := decode(redirection.NFTablesTable, messages)
		if err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(got, again) {
			t.Errorf("decoded differently the second time: %+v, %+v", got, again)
		}
		for _, d := range differences(want, got) {
			if d.Want == "" && d.Got == "" {
				t.Errorf("empty difference %s", d)
			}
		}
	})
}

// TestKeyOfEveryOption changes one field of the options at a time.
func TestKeyOfEveryOption(t *testing.T) {
	seen := map[cacheKey]string{keyOf(redirection.DefaultOptions(), redirection.DualStack): "the default"}
	for i := range reflect.TypeFor[redirection.Options]().NumField() {
		opts := redirection.DefaultOptions()
		name := reflect.TypeOf(opts).Field(i).Name
		switch field := reflect.ValueOf(&opts).Elem().Field(i); field.Kind() {
		case reflect.Bool:
			field.SetBool(!field.Bool())
		case reflect.String:
			field.SetString("other")
		case reflect.Slice:
			field.Set(reflect.MakeSlice(field.Type(), 1, 1))
			if element := field.Index(0); element.Kind() == reflect.String {
				element.SetString("tap0")
			}
		case reflect.Struct: // an address
			field.SetZero()
		default:
			t.Fatalf("field %s is of a kind that is new here", name)
		}
		key := keyOf(opts, redirection.DualStack)
		if other, taken := seen[key]; taken {
			t.Errorf("%s and %s have the same key", name, other)
		}
		seen[key] = name
	}
	if _, taken := seen[keyOf(redirection.DefaultOptions(), redirection.IPv4)]; taken {
		t.Error("other families have the same key")
	}
}
