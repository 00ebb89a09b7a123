// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"
)

// WriteTable writes s for people: first how the agent is, then each pod, then
// what is wrong with certificates and pods' options, what audits have put right or
// cannot, which manifests are not in use, then who was left out and why.
func WriteTable(w io.Writer, s Status, now time.Time) error {
	var page bytes.Buffer
	writeAgent(&page, s, now)
	writePods(&page, s, now)
	writeTrouble(&page, s.Identities)
	writeOptions(&page, s.Pods)
	writeRepairs(&page, s, now)
	writeManifests(&page, s.ManifestProblems)
	writeSkipped(&page, s.Skipped)
	if _, err := w.Write(page.Bytes()); err != nil {
		return fmt.Errorf("writing the status: %w", err)
	}
	return nil
}

// row writes cells to a table; control characters in them, which a name or an
// error of a CA might bring, do not reach the terminal.
func row(table io.Writer, cells ...string) {
	for i, cell := range cells {
		cells[i] = strings.Map(func(r rune) rune {
			if unicode.IsControl(r) {
				return ' '
			}
			return r
		}, cell)
	}
	fmt.Fprintln(table, strings.Join(cells, "\t"))
}

// inColumns calls fill with a table and writes it out.
func inColumns(page *bytes.Buffer, fill func(table io.Writer)) {
	table := tabwriter.NewWriter(page, 0, 0, 2, ' ', tabwriter.DiscardEmptyColumns)
	fill(table)
	_ = table.Flush() // a buffer takes everything
}

func writeAgent(page *bytes.Buffer, s Status, now time.Time) {
	inColumns(page, func(table io.Writer) {
		row(table, "node", s.Node)
		row(table, "version", s.Version)
		row(table, "uptime", short(now.Sub(s.Started)))
		row(table, "trust domain", s.TrustDomain)
		row(table, "redirection", backend(s.Redirection, now))
		row(table, "ready", map[bool]string{true: "yes", false: "no"}[s.Ready])
		row(table, "proxies", proxies(s.Proxies, now))
		row(table, "pods", podCounts(s))
	})
}

// backend says which it is, why, and since when that is known: the decision is kept
// until the machine boots.
func backend(r RedirectionStatus, now time.Time) string {
	reason := r.Reason
	if !r.Probed.IsZero() {
		reason += "; probed " + short(now.Sub(r.Probed)) + " ago"
	}
	return fmt.Sprintf("%s (%s)", r.Backend, reason)
}

func proxies(connected []ProxyStatus, now time.Time) string {
	if len(connected) == 0 {
		return "none connected; pods of the mesh cannot start until one is"
	}
	texts := make([]string, 0, len(connected))
	for _, p := range connected {
		state := "waiting for its snapshot's ack"
		if p.Ready {
			state = "ready"
		}
		texts = append(texts, fmt.Sprintf("connected for %s, %s", short(now.Sub(p.Since)), state))
	}
	return strings.Join(texts, "; ")
}

func podCounts(s Status) string {
	count := map[string]int{}
	for _, pod := range s.Pods {
		count[pod.State]++
	}
	return fmt.Sprintf("%d enrolled, %d enrolling, %d degraded, %d not in the mesh",
		count[PodEnrolled], count[PodEnrolling], count[PodDegraded], len(s.Skipped))
}

func writePods(page *bytes.Buffer, s Status, now time.Time) {
	if len(s.Pods) == 0 {
		return
	}
	page.WriteByte('\n')
	inColumns(page, func(table io.Writer) {
		row(table, "POD", "UID", "NETNS", "STATE", "BACKEND", "FAMILIES", "PROXY", "IDENTITY", "CERTIFICATE", "KEPT", "REPAIRS")
		for _, p := range s.Pods {
			row(table, p.Namespace+"/"+p.Name, p.UID, cmp.Or(p.Netns, "-"), p.State, p.Backend,
				families(p.Families, s.Redirection), p.Proxy, p.Identity, certificate(p.Certificate, now), kept(p.KeptConnections), strconv.Itoa(p.Audit.Repairs))
		}
	})
}

// families names those that are captured, and what becomes of IPv6 where it is not.
func families(captured []string, r RedirectionStatus) string {
	switch {
	case len(captured) == 0:
		return "-"
	case slices.Contains(captured, "ipv6") || r.IPv6Uncaptured == "":
		return strings.Join(captured, ",")
	default:
		return fmt.Sprintf("%s (ipv6: %s)", strings.Join(captured, ","), r.IPv6Uncaptured)
	}
}

// kept is how many connections from before are left.
func kept(n *int) string {
	if n == nil {
		return "-"
	}
	return strconv.Itoa(*n)
}

func certificate(c CertificateStatus, now time.Time) string {
	switch left := c.NotAfter.Sub(now); {
	case c.NotAfter.IsZero():
		return c.State
	case left <= 0:
		return fmt.Sprintf("%s (expired %s ago)", c.State, short(-left))
	default:
		return fmt.Sprintf("%s (expires in %s)", c.State, short(left))
	}
}

func writeTrouble(page *bytes.Buffer, identities []IdentityStatus) {
	title := "\nCERTIFICATE TROUBLE\n"
	for _, id := range identities {
		if id.LastError == "" {
			continue
		}
		page.WriteString(title)
		title = ""
		row(page, fmt.Sprintf("%s: %s", id.ID, id.LastError))
	}
}

func writeOptions(page *bytes.Buffer, pods []PodStatus) {
	title := "\nOPTIONS THAT COUNT AS ABSENT\n"
	for _, p := range pods {
		for _, m := range p.MalformedOptions {
			page.WriteString(title)
			title = ""
			row(page, fmt.Sprintf("%s/%s: %s=%q: %s", p.Namespace, p.Name, m.Annotation, m.Value, m.Problem))
		}
	}
}

func writeManifests(page *bytes.Buffer, problems []string) {
	if len(problems) == 0 {
		return
	}
	page.WriteString("\nMANIFESTS THAT ARE NOT IN USE, OR NOT WHOLLY\n")
	for _, p := range problems {
		row(page, p)
	}
}

func writeRepairs(page *bytes.Buffer, s Status, now time.Time) {
	var lines []string
	for _, p := range s.Pods {
		name := p.Namespace + "/" + p.Name
		lines = append(lines, repairs(name, p.Audit, now)...)
		for _, probe := range p.Probes {
			if !probe.OK() {
				lines = append(lines, fmt.Sprintf("%s: %s (%s ago)", name, probe, short(now.Sub(probe.Checked))))
			}
		}
	}
	lines = append(lines, repairs("the host's rule for probes", s.Host.Audit, now)...)
	if len(lines) == 0 {
		return
	}
	page.WriteString("\nAUDITS\n")
	for _, line := range lines {
		row(page, line)
	}
}

// repairs says what audits have put right, and what they cannot.
func repairs(name string, a AuditStatus, now time.Time) (lines []string) {
	if a.Error != "" {
		lines = append(lines, fmt.Sprintf("%s: cannot be compared or repaired: %s", name, a.Error))
	}
	if a.Repairs > 0 {
		lines = append(lines, fmt.Sprintf("%s: repaired %s, last %s ago", name, times(a.Repairs), short(now.Sub(a.LastRepair))))
		for _, difference := range a.Repaired {
			lines = append(lines, "  "+difference)
		}
	}
	return lines
}

func times(n int) string {
	if n == 1 {
		return "once"
	}
	return fmt.Sprintf("%d times", n)
}

func writeSkipped(page *bytes.Buffer, skipped []SkippedStatus) {
	if len(skipped) == 0 {
		return
	}
	page.WriteByte('\n')
	inColumns(page, func(table io.Writer) {
		row(table, "NOT IN THE MESH", "BECAUSE")
		for _, pod := range skipped {
			row(table, pod.Namespace+"/"+pod.Name, pod.Reason)
		}
	})
}

// short renders d with two units at most: 3d4h, 23h59m, 1m5s, 12s.
func short(d time.Duration) string {
	const day = 24 * time.Hour
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", max(d, 0)/time.Second)
	case d < time.Hour:
		return fmt.Sprintf("%dm%ds", d/time.Minute, d%time.Minute/time.Second)
	case d < day:
		return fmt.Sprintf("%dh%dm", d/time.Hour, d%time.Hour/time.Minute)
	}
	return fmt.Sprintf("%dd%dh", d/day, d%day/time.Hour)
}
