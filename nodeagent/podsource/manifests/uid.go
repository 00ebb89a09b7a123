// SPDX-License-Identifier: Apache-2.0

package manifests

import (
	"crypto/sha1" //nolint:gosec // UUIDv5 is defined by it, and nothing is protected by it
	"encoding/hex"
)

// namespaceURL is the name space ID for URLs, 6ba7b811-9dad-11d1-80b4-00c04fd430c8
// (RFC 9562, section 6.6).
const namespaceURL = "\x6b\xa7\xb8\x11\x9d\xad\x11\xd1\x80\xb4\x00\xc0\x4f\xd4\x30\xc8"

// DerivedUID is the UID of a pod whose manifest has none: the UUIDv5 (RFC 9562,
// section 5.5) of "namespace/name" in the name space for URLs. Whatever starts
// the pod can compute it too, in Python uuid.uuid5(uuid.NAMESPACE_URL, "shop/web-0").
func DerivedUID(namespace, name string) string {
	id := sha1.Sum([]byte(namespaceURL + namespace + "/" + name)) //nolint:gosec // as above
	id[6] = id[6]&0x0f | 0x50                                     // version 5
	id[8] = id[8]&0x3f | 0x80                                     // variant 10
	text := hex.EncodeToString(id[:16])
	return text[:8] + "-" + text[8:12] + "-" + text[12:16] + "-" + text[16:20] + "-" + text[20:]
}
