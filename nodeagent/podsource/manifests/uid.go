// SPDX-License-Identifier: Apache-2.0

package manifests

import (
	"crypto/sha1"
	"encoding/hex"
)

// namespaceURL is the name space ID for URLs, 6ba7b811-9dad-11d1-80b4-00c04fd430c8
// (RFC 9562, section 6.6).
var namespaceURL = [16]byte{0x6b, 0xa7, 0xb8, 0x11, 0x9d, 0xad, 0x11, 0xd1, 0x80, 0xb4, 0x00, 0xc0, 0x4f, 0xd4, 0x30, 0xc8}

// DerivedUID is the UID of a pod whose manifest has none: the UUIDv5 (RFC 9562,
// section 5.5) of "namespace/name" in the name space for URLs. Whatever starts
// the pod can compute it too, in Python uuid.uuid5(uuid.NAMESPACE_URL, "shop/web-0").
func DerivedUID(namespace, name string) string {
	h := sha1.New() // not for security: the version says SHA-1
	h.Write(namespaceURL[:])
	h.Write([]byte(namespace + "/" + name))
	id := h.Sum(nil)[:16]
	id[6] = id[6]&0x0f | 0x50 // version 5
	id[8] = id[8]&0x3f | 0x80 // variant 10
	text := hex.EncodeToString(id)
	return text[:8] + "-" + text[8:12] + "-" + text[12:16] + "-" + text[16:20] + "-" + text[20:]
}
