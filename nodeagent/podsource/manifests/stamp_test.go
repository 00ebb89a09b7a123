// SPDX-License-Identifier: Apache-2.0

package manifests

import (
	"os"
	"path/filepath"
	"testing"
	"time"
)

// Kernels before 6.13 may give two writes the same time. Whether the one at hand
// does, the young stamp is not believed.
func TestYoungStampsAreNotBelieved(t *testing.T) {
	dir := t.TempDir()
	content := "apiVersion: v1\nkind: Pod\nmetadata: {name: a, namespace: shop}\n"
	before := time.Now()
	if err := os.WriteFile(filepath.Join(dir, "a.yaml"), []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	f := loadFile(dir, "a.yaml", nil)
	if stalled := time.Since(before) > settleTime; f.err != nil || f.settled && !stalled {
		t.Fatalf("error %v, settled %v; want a file that has not settled", f.err, f.settled)
	}
	f.settled = false // also where the machine stalled meanwhile
	other := *f
	other.digest[0]++
	if again := loadFile(dir, "a.yaml", &other); again.digest != f.digest {
		t.Error("a file that had not settled was not read again")
	}
	if again := loadFile(dir, "a.yaml", f); again.settled == f.settled && again != f {
		t.Error("a file that says the same again is another one")
	}
	s, err := load(dir, &snapshot{})
	if err != nil {
		t.Fatal(err)
	}
	e := s.pods[podName{"shop", "a"}]
	s.settled, e.files[0].settled = false, false
	if s.current(dir, e) {
		t.Error("a snapshot that has not settled counts as current")
	}

	settled := *f
	settled.settled = true
	if again := loadFile(dir, "a.yaml", &settled); again != &settled {
		t.Error("a file that had settled was read again without a change")
	}
	s.settled, e.files[0].settled = true, true
	if !s.current(dir, e) {
		t.Error("a snapshot that has settled does not count as current")
	}
	// The same content in another file.
	if err := os.Rename(filepath.Join(dir, "a.yaml"), filepath.Join(dir, "b.yaml")); err != nil {
		t.Fatal(err)
	}
	if s.current(dir, e) {
		t.Error("a snapshot of what was renamed counts as current")
	}
}
