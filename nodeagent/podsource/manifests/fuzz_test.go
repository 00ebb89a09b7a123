// SPDX-License-Identifier: Apache-2.0

package manifests

import (
	"testing"

	"k8s.io/apimachinery/pkg/util/validation"
)

// Whatever a file holds, it is refused, or all that comes of it can be part of
// an identity.
func FuzzDecode(f *testing.F) {
	for _, seed := range []string{
		"", "---\n", "null", "[]", "kind: Pod", "\x00", "a: &a [*a]",
		"apiVersion: v1\nkind: Pod\nmetadata: {name: web, namespace: shop, uid: u}\nspec: {serviceAccountName: web}\n",
		"# c\n---\napiVersion: v1\nkind: Namespace\nmetadata: {name: shop, labels: {a: b}}\n---\napiVersion: v1\nkind: Pod\nmetadata: {name: web}\n",
		`{"apiVersion":"v1","kind":"Pod","metadata":{"name":"st","annotations":{"kubernetes.io/config.hash":"h"}}}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, content []byte) {
		found, err := decode(content)
		if err != nil {
			if len(found.pods)+len(found.namespaces) > 0 {
				t.Errorf("refused (%v), and yet returned %+v", err, found)
			}
			return
		}
		for _, pod := range found.pods {
			ok := len(validation.IsDNS1123Label(pod.Namespace)) == 0 && len(validation.IsDNS1123Subdomain(pod.Name)) == 0 &&
				pod.UID != "" && len(pod.UID) <= maxUIDBytes &&
				(pod.Static || len(validation.IsDNS1123Subdomain(pod.ServiceAccount)) == 0)
			if !ok {
				t.Errorf("accepted %+v", pod)
			}
		}
	})
}
