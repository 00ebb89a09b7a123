// SPDX-License-Identifier: Apache-2.0

package audit

import (
	"fmt"
	"time"

	"ambientd/nodeagent/admin"
)

// maxShown bounds how many differences a log line and the status show: a flushed table
// differs in every rule.
const maxShown = 8

// result is what audits of one subject have shown.
type result struct {
	status admin.AuditStatus
	failed string // what the last failure said and differed in, so that it is logged once
}

// outcome is what one audit has shown.
type outcome struct {
	subject     string // "pod" or "host"
	attrs       []any  // that name it in the log
	differences []string
	parts       []string
	err         error
	started     time.Time
}

// report keeps an outcome as the subject's result, counts it, and logs it once: a
// repair each time, a failure when it is another than the last one.
func (a *Auditor) report(r *result, o outcome) {
	now := time.Now()
	a.cfg.Recorder.Audited(o.subject, now.Sub(o.started))
	shown := shorten(o.differences)
	failed := ""
	if o.err != nil {
		failed = fmt.Sprint(o.err, shown)
	}
	a.results.mu.Lock()
	again := failed == r.failed
	r.failed = failed
	r.status.LastAudit, r.status.Error = now, ""
	switch {
	case o.err != nil:
		r.status.Error = o.err.Error()
	case len(o.differences) > 0:
		r.status.Repairs++
		r.status.LastRepair, r.status.Repaired = now, shown
	}
	a.results.mu.Unlock()

	if o.err == nil && len(o.differences) == 0 {
		return // as almost always
	}
	logger := a.cfg.Logger.With("subject", o.subject).With(o.attrs...)
	switch {
	case o.err != nil:
		a.cfg.Recorder.RepairFailed(o.subject)
		if !again {
			logger.Warn("audit failed, it is tried again", "differences", shown, "err", o.err)
		}
	case len(o.differences) > 0:
		for _, part := range o.parts {
			a.cfg.Recorder.Repaired(part)
		}
		logger.Warn("audit has repaired what differed", "parts", o.parts, "differences", shown, "took", now.Sub(o.started).Round(time.Microsecond))
	}
}

// shorten returns the first differences and how many more there are.
func shorten(differences []string) []string {
	if len(differences) <= maxShown {
		return differences
	}
	shown := append([]string(nil), differences[:maxShown]...)
	return append(shown, fmt.Sprintf("and %d more", len(differences)-maxShown))
}

// PodStatus returns what audits of a pod have shown.
func (a *Auditor) PodStatus(uid string) admin.AuditStatus {
	a.results.mu.Lock()
	defer a.results.mu.Unlock()
	if r := a.results.pods[uid]; r != nil {
		return r.status
	}
	return admin.AuditStatus{}
}

// HostStatus returns what audits of the host's rule and set have shown.
func (a *Auditor) HostStatus() admin.AuditStatus {
	a.results.mu.Lock()
	defer a.results.mu.Unlock()
	return a.results.host.status
}
