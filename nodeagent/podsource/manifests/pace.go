// SPDX-License-Identifier: Apache-2.0

package manifests

import (
	"path/filepath"
	"strings"
	"time"

	"github.com/fsnotify/fsnotify"
)

const (
	// quietTime gathers the events of one change, such as a file written in parts.
	quietTime = 20 * time.Millisecond

	// wholeTime gathers files that arrive by rename one after the other. The first is read at
	// once: what is in such a file is all there.
	wholeTime = time.Millisecond
)

// pace says when the directory is to be read after an event.
type pace struct {
	quiet, soon *time.Timer
	writing     time.Time // until when a manifest may be half written
	whole       time.Time // when the last file came by rename
}

// newPace returns one whose quiet timer fires at once.
func newPace() *pace {
	p := &pace{quiet: time.NewTimer(0), soon: time.NewTimer(time.Hour)}
	p.soon.Stop()
	return p
}

func (p *pace) stop() {
	p.quiet.Stop()
	p.soon.Stop()
}

// note takes in an event. While a manifest may be half written, nothing is read for the
// sake of another one: of what is missing its pods would seem to have gone.
func (p *pace) note(e fsnotify.Event, now time.Time) {
	switch {
	case isWhole(e) && !now.Before(p.writing):
		wait := time.Duration(0)
		if now.Sub(p.whole) < quietTime {
			wait = wholeTime
		}
		p.whole = now
		p.soon.Reset(wait)
		return
	case isManifest(filepath.Base(e.Name)) && !isWhole(e) && (e.Has(fsnotify.Create) || e.Has(fsnotify.Write)):
		p.writing = now.Add(quietTime)
	}
	p.quiet.Reset(quietTime)
}

// isWhole tells whether the event is that a file has come by rename from within the
// directory. The event does not say so but in its text; should that change one day, each
// change is read after quietTime.
func isWhole(e fsnotify.Event) bool {
	return e.Has(fsnotify.Create) && strings.Contains(e.String(), ` ← "`) && !strings.Contains(e.Name, "←")
}
