// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"bytes"
	"fmt"
	"io"
)

// WriteFindings writes r for people: each pod with what was found, then the host's
// rule.
func WriteFindings(w io.Writer, r VerifyResult) error {
	var page bytes.Buffer
	for _, pod := range r.Pods {
		writeFinding(&page, pod.Pod, pod.Differences, pod.Error)
		for _, probe := range pod.Probes {
			row(&page, "  "+probe.String())
		}
	}
	if len(r.Pods) == 0 {
		row(&page, "no pod is enrolled")
	}
	writeFinding(&page, "the host's rule for probes", r.Host.Differences, r.Host.Error)
	if _, err := w.Write(page.Bytes()); err != nil {
		return fmt.Errorf("writing what was found: %w", err)
	}
	return nil
}

func writeFinding(page *bytes.Buffer, name string, differences []string, failure string) {
	switch {
	case failure != "":
		row(page, fmt.Sprintf("%s: cannot be compared or repaired: %s", name, failure))
	case len(differences) > 0:
		row(page, fmt.Sprintf("%s: differed, and was repaired", name))
	default:
		row(page, name+": as it should be")
	}
	for _, d := range differences {
		row(page, "  "+d)
	}
}
