// SPDX-License-Identifier: Apache-2.0

package spiffeid

import (
	"crypto/x509/pkix"
	"encoding/asn1"
	"errors"
	"fmt"
)

// tagURI is uniformResourceIdentifier among the GeneralNames (RFC 5280, section 4.2.1.6).
const tagURI = 6

// IsSubjectAltName reports whether oid names the subject alternative name extension.
func IsSubjectAltName(oid asn1.ObjectIdentifier) bool { return oid.Equal(oidSubjectAltName()) }

func oidSubjectAltName() asn1.ObjectIdentifier { return asn1.ObjectIdentifier{2, 5, 29, 17} }

// SubjectAltName is the extension that says id and nothing else. It is critical, as RFC 5280
// demands where the subject is empty, and some CAs refuse it otherwise.
//
// DER has one encoding for one value, so comparing these bytes is the strictest check that a
// certificate or a request names exactly id: it also catches the kinds of names that crypto/x509
// skips (otherName, directoryName, registeredID), and spellings that url.Parse would smooth.
// Id must not be the zero value.
func (id ID) SubjectAltName() (pkix.Extension, error) {
	if id.IsZero() {
		return pkix.Extension{}, errors.New("the zero SPIFFE ID is no identity and cannot be certified")
	}
	names := []asn1.RawValue{{Class: asn1.ClassContextSpecific, Tag: tagURI, Bytes: []byte(id.uri)}}
	der, err := asn1.Marshal(names)
	if err != nil {
		return pkix.Extension{}, fmt.Errorf("encoding the subject alternative name of %s: %w", id, err)
	}
	return pkix.Extension{Id: oidSubjectAltName(), Critical: true, Value: der}, nil
}
