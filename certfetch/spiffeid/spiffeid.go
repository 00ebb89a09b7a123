// SPDX-License-Identifier: Apache-2.0

// Package spiffeid owns the name of a workload: the SPIFFE ID
//
//	spiffe://<trust domain>/ns/<namespace>/sa/<service account>
//
// and its one form inside certificates and signing requests.
//
// It refuses everything else, also what the SPIFFE ID specification would allow: other paths, and
// above all a second spelling of the same name. Two IDs are the same exactly if their strings are,
// so that no check can be passed with one spelling and undermined with another.
package spiffeid

import (
	"encoding"
	"errors"
	"fmt"
	"net/url"
	"strings"
)

const (
	scheme        = "spiffe://"
	namespaceMark = "/ns/"
	accountMark   = "/sa/"
)

const (
	maxTrustDomain = 253 // RFC 1035's limit for a name
	maxLabel       = 63  // RFC 1123's limit for a label
	maxNamespace   = maxLabel
	maxAccount     = 253 // Kubernetes' limit for a DNS subdomain
	maxQuoted      = 100 // how much of a hostile string an error message repeats
)

// What an operator reads about a name that was refused.
const (
	badScheme      = "it does not begin with spiffe://"
	badPath        = "the path is not /ns/<namespace>/sa/<service account>"
	badTrustDomain = "the trust domain is not dot-separated labels of lower case letters, digits, '-' and '_' (63 each, 253 in all)"
	badNamespace   = "the namespace is not a DNS label (lower case letters, digits and inner hyphens, at most 63)"
	badAccount     = "the service account is not a DNS subdomain (labels of lower case letters, digits and inner hyphens, at most 253)"
)

// MaxLength is the length in bytes of the longest [ID]; a longer string is refused before it is
// looked at.
const MaxLength = len(scheme) + maxTrustDomain + len(namespaceMark) + maxNamespace + len(accountMark) + maxAccount

// Compile-time proof of what the other parts rely on: IDs are map keys and travel as text.
var (
	_ = map[ID]struct{}{}
	_ = map[TrustDomain]struct{}{}

	_ encoding.TextMarshaler   = ID{}
	_ encoding.TextUnmarshaler = (*ID)(nil)
)

// TrustDomain is the name under which one authority issues identities. Comparable; the zero value
// is no trust domain.
type TrustDomain struct{ name string }

// ParseTrustDomain takes a bare name such as cluster.local, without scheme or path.
//
// It is narrower than the SPIFFE ID specification (section 2.1), which allows 255 bytes and says
// nothing of dots: empty labels, labels over 63 bytes and names over 253 are refused, because
// X.509 libraries take the host of a URI for a DNS name and would not parse the certificate.
func ParseTrustDomain(s string) (TrustDomain, error) {
	if !validTrustDomain(s) {
		return TrustDomain{}, fmt.Errorf("trust domain %s: %s", quote(s), badTrustDomain)
	}
	return TrustDomain{name: s}, nil
}

// String is the bare name; empty for the zero value.
func (td TrustDomain) String() string { return td.name }

// IsZero reports whether td is the zero value, which is no trust domain.
func (td TrustDomain) IsZero() bool { return td.name == "" }

// URL is the trust domain's own SPIFFE ID, spiffe://<name>, which a CA's certificate carries.
func (td TrustDomain) URL() *url.URL { return &url.URL{Scheme: "spiffe", Host: td.name} }

// ID is a workload's identity. Comparable, and fit as a map key; the zero value is no identity.
type ID struct {
	// The whole ID, so that String and comparison cost nothing. The offsets follow from it.
	uri string
	// Where the namespace ends and where the trust domain ends.
	tdEnd, nsEnd uint16
}

// Parse takes a SPIFFE ID in the only spelling that there is. It never panics, and does work in
// proportion to [MaxLength] at most, whatever the string is.
func Parse(s string) (ID, error) {
	if len(s) > MaxLength {
		return ID{}, fmt.Errorf("SPIFFE ID %s: its %d bytes are more than the %d that one can have", quote(s), len(s), MaxLength)
	}
	rest, ok := strings.CutPrefix(s, scheme)
	if !ok {
		return ID{}, invalid(s, badScheme)
	}
	// None of the three parts can hold a slash, so cutting at the first mark cuts at the right one.
	td, path, _ := strings.Cut(rest, "/")
	if !validTrustDomain(td) {
		return ID{}, invalid(s, badTrustDomain)
	}
	path, ok = strings.CutPrefix(path, namespaceMark[1:])
	if !ok {
		return ID{}, invalid(s, badPath)
	}
	namespace, account, ok := strings.Cut(path, accountMark)
	if !ok {
		return ID{}, invalid(s, badPath)
	}
	if why := checkPath(namespace, account); why != "" {
		return ID{}, invalid(s, why)
	}
	return assemble(s, td, namespace), nil
}

// New is the identity of a service account in a namespace, by the names that Kubernetes gave them.
func New(td TrustDomain, namespace, serviceAccount string) (ID, error) {
	if td.IsZero() {
		return ID{}, errors.New("an identity needs a trust domain")
	}
	if why := checkPath(namespace, serviceAccount); why != "" {
		return ID{}, fmt.Errorf("identity of service account %s in namespace %s: %s", quote(serviceAccount), quote(namespace), why)
	}
	return assemble(scheme+td.name+namespaceMark+namespace+accountMark+serviceAccount, td.name, namespace), nil
}

// assemble remembers where the parts of a valid ID are.
func assemble(uri, td, namespace string) ID {
	tdEnd := len(scheme) + len(td)
	nsEnd := tdEnd + len(namespaceMark) + len(namespace)
	// Both are below MaxLength, which is below 2^16.
	return ID{uri: uri, tdEnd: uint16(tdEnd), nsEnd: uint16(nsEnd)}
}

// String is the whole ID, spiffe://…; empty for the zero value. It does not allocate.
func (id ID) String() string { return id.uri }

// IsZero reports whether id is the zero value, which is no identity.
func (id ID) IsZero() bool { return id.uri == "" }

// TrustDomain is the part that says which authority vouches for id.
func (id ID) TrustDomain() TrustDomain {
	if id.IsZero() {
		return TrustDomain{}
	}
	return TrustDomain{name: id.uri[len(scheme):id.tdEnd]}
}

// Namespace is the Kubernetes namespace of the service account; empty for the zero value.
func (id ID) Namespace() string {
	if id.IsZero() {
		return ""
	}
	return id.uri[int(id.tdEnd)+len(namespaceMark) : id.nsEnd]
}

// ServiceAccount is the name of the Kubernetes service account; empty for the zero value.
func (id ID) ServiceAccount() string {
	if id.IsZero() {
		return ""
	}
	return id.uri[int(id.nsEnd)+len(accountMark):]
}

// URL is the ID as a URL of the caller's own, which crypto/x509 and TLS libraries take.
func (id ID) URL() *url.URL {
	if id.IsZero() {
		return new(url.URL)
	}
	return &url.URL{Scheme: "spiffe", Host: id.uri[len(scheme):id.tdEnd], Path: id.uri[id.tdEnd:]}
}

// MarshalText is String, with the zero value an error: nothing should travel without a name.
func (id ID) MarshalText() ([]byte, error) {
	if id.IsZero() {
		return nil, errors.New("the zero SPIFFE ID is no identity and has no text")
	}
	return []byte(id.uri), nil
}

// UnmarshalText is Parse.
func (id *ID) UnmarshalText(text []byte) error {
	// Before the conversion: a hostile megabyte is not copied first.
	if len(text) > MaxLength {
		return fmt.Errorf("SPIFFE ID of %d bytes: at most %d are allowed", len(text), MaxLength)
	}
	parsed, err := Parse(string(text))
	if err != nil {
		return err
	}
	*id = parsed
	return nil
}

// checkPath says what is wrong with the two names, or nothing.
func checkPath(namespace, account string) string {
	switch {
	case len(namespace) > maxNamespace || !validLabel(namespace):
		return badNamespace
	case !validSubdomain(account):
		return badAccount
	}
	return ""
}

func validTrustDomain(s string) bool {
	if len(s) > maxTrustDomain {
		return false
	}
	for label := range strings.SplitSeq(s, ".") {
		if label == "" || len(label) > maxLabel {
			return false
		}
		for i := range len(label) {
			if c := label[i]; !isLowerAlnum(c) && c != '-' && c != '_' {
				return false
			}
		}
	}
	return true
}

// validSubdomain is Kubernetes' IsDNS1123Subdomain, which bounds the whole and not each label.
func validSubdomain(s string) bool {
	if len(s) > maxAccount {
		return false
	}
	for label := range strings.SplitSeq(s, ".") {
		if !validLabel(label) {
			return false
		}
	}
	return true
}

// validLabel is the shape of a DNS label (RFC 1123); the length is the caller's business.
func validLabel(s string) bool {
	if s == "" || !isLowerAlnum(s[0]) || !isLowerAlnum(s[len(s)-1]) {
		return false
	}
	for i := range len(s) {
		if c := s[i]; !isLowerAlnum(c) && c != '-' {
			return false
		}
	}
	return true
}

func isLowerAlnum(c byte) bool { return 'a' <= c && c <= 'z' || '0' <= c && c <= '9' }

func invalid(s, why string) error { return fmt.Errorf("SPIFFE ID %s: %s", quote(s), why) }

// quote makes a hostile string fit for a log line: escaped, and not longer than helps.
func quote(s string) string {
	if len(s) > maxQuoted {
		return fmt.Sprintf("%q…", s[:maxQuoted])
	}
	return fmt.Sprintf("%q", s)
}
