// SPDX-License-Identifier: Apache-2.0

package spiffeid

import (
	"crypto/x509/pkix"
	"encoding/asn1"
)

// The DER of a list with one name (RFC 5280, section 4.2.1.6): SEQUENCE, and in it
// uniformResourceIdentifier, which is [6] IMPLICIT IA5String.
const (
	tagSequence = 0x30
	tagURI      = 0x80 | 6
)

// IsSubjectAltName reports whether oid names the subject alternative name extension.
func IsSubjectAltName(oid asn1.ObjectIdentifier) bool { return oid.Equal(oidSubjectAltName()) }

func oidSubjectAltName() asn1.ObjectIdentifier { return asn1.ObjectIdentifier{2, 5, 29, 17} }

// SubjectAltName is the extension that says id and nothing else. It is critical, as RFC 5280
// demands where the subject is empty, and some CAs refuse it otherwise. The zero value's is empty,
// and therefore not equal to any.
//
// DER has one encoding for one value, so comparing these bytes is the strictest check that a
// certificate or a request names exactly id: it also catches the kinds of names that crypto/x509
// skips (otherName, directoryName, registeredID), and spellings that url.Parse would smooth.
func (id ID) SubjectAltName() pkix.Extension {
	if id.IsZero() {
		return pkix.Extension{Id: oidSubjectAltName(), Critical: true}
	}
	// Both lengths take three bytes at most, as MaxLength is below 2^16.
	value := make([]byte, 0, 8+len(id.uri))
	name := appendLength([]byte{tagURI}, len(id.uri))
	value = appendLength(append(value, tagSequence), len(name)+len(id.uri))
	value = append(append(value, name...), id.uri...)
	return pkix.Extension{Id: oidSubjectAltName(), Critical: true, Value: value}
}

// appendLength writes a definite length below 2^16 in the shortest form, as DER demands (X.690,
// section 10.1).
func appendLength(der []byte, n int) []byte {
	switch {
	case n < 0x80:
		return append(der, byte(n))
	case n < 0x100:
		return append(der, 0x81, byte(n))
	default:
		return append(der, 0x82, byte(n>>8), byte(n))
	}
}
