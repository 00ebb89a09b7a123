// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"bytes"
	"cmp"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"
)

// WriteTable writes s for people: first how the agent is, then each pod, then
// what is wrong with certificates, then who was left out and why.
func WriteTable(w io.Writer, s Status, now time.Time) error {
	var page bytes.Buffer
	writeAgent(&page, s, now)
	writePods(&page, s.Pods, now)
	writeTrouble(&page, s.Identities)
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
		row(table, "redirection", fmt.Sprintf("%s (%s)", s.Redirection.Backend, s.Redirection.Reason))
		row(table, "ready", map[bool]string{true: "yes", false: "no"}[s.Ready])
		row(table, "proxies", proxies(s.Proxies, now))
		row(table, "pods", podCounts(s))
	})
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

func writePods(page *bytes.Buffer, pods []PodStatus, now time.Time) {
	if len(pods) == 0 {
		return
	}
	page.WriteByte('\n')
	inColumns(page, func(table io.Writer) {
		row(table, "POD", "UID", "NETNS", "STATE", "BACKEND", "FAMILIES", "PROXY", "IDENTITY", "CERTIFICATE")
		for _, p := range pods {
			row(table, p.Namespace+"/"+p.Name, p.UID, cmp.Or(p.Netns, "-"), p.State, p.Backend,
				cmp.Or(strings.Join(p.Families, ","), "-"), p.Proxy, p.Identity, certificate(p.Certificate, now))
		}
	})
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
