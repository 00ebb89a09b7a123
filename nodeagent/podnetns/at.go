// SPDX-License-Identifier: Apache-2.0

package podnetns

import (
	"fmt"
	"os"
)

// IsAt tells whether the file at path, such as a runtime's /var/run/netns/cni-…, is
// this netns. Its inode number is sure to be no other's as long as the Netns is open.
func (n *Netns) IsAt(path string) (bool, error) {
	there, err := os.Stat(path)
	if err != nil {
		return false, fmt.Errorf("looking whether netns %s is at its path: %w", n.key, err)
	}
	here, err := n.file.Stat()
	if err != nil {
		return false, fmt.Errorf("looking whether netns %s is at %s: %w", n.key, path, err)
	}
	return os.SameFile(there, here), nil
}
