// SPDX-License-Identifier: Apache-2.0

package manifests

import (
	"fmt"
	"io/fs"
	"os"
	"syscall"
	"time"
)

// settleTime is how old a change has to be before an unchanged stamp means
// unchanged content. The kernel stamps files with a clock that ticks every 1 to
// 10 ms, so two writes may get the same time.
const settleTime = 100 * time.Millisecond

// stamp changes with the content of a file or directory, once it has settled.
type stamp struct {
	device, inode uint64
	size          int64
	modified      syscall.Timespec
	changed       syscall.Timespec
}

// stat returns the stamp of what path leads to, and whether it has settled. The
// content has to be read after it.
func stat(path string) (s stamp, settled bool, mode fs.FileMode, err error) {
	now := time.Now()
	info, err := os.Stat(path)
	if err != nil {
		return stamp{}, false, 0, err
	}
	sys, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return stamp{}, false, 0, fmt.Errorf("stat %s: no inode", path)
	}
	s = stamp{device: sys.Dev, inode: sys.Ino, size: sys.Size, modified: sys.Mtim, changed: sys.Ctim}
	return s, now.Sub(time.Unix(sys.Ctim.Unix())) > settleTime, info.Mode(), nil
}

// unchanged says whether path still has the stamp s.
func (s stamp) unchanged(path string) bool {
	now, _, _, err := stat(path)
	return err == nil && now == s
}
