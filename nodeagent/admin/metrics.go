// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// namespace is before the name of every metric.
const namespace = "ambientd"

// Limits of /metrics, which is open to whoever reaches the node's address.
const (
	maxScrapes    = 4 // at once
	scrapeTimeout = 5 * time.Second
)

// Metrics are what the agent counts, and what it derives from its status when it is
// asked. They have a registry of their own.
type Metrics struct {
	registry *prometheus.Registry

	requests       *prometheus.CounterVec
	requestSeconds *prometheus.HistogramVec
	repairs        *prometheus.CounterVec
	repairFailures *prometheus.CounterVec
	auditSeconds   *prometheus.HistogramVec
	lateEnrolments prometheus.Counter
}

// NewMetrics returns metrics that are all zero. status is called at each scrape, from
// any goroutine.
func NewMetrics(status func() Status) (*Metrics, error) {
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: namespace, Name: name, Help: help}, labels)
	}
	m := &Metrics{
		registry: prometheus.NewRegistry(),
		requests: counter("cni_requests_total", "Events of the CNI plugin by how they were answered; code is the CNI error's.",
			"command", "result", "code"),
		requestSeconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Namespace: namespace, Name: "cni_request_duration_seconds", Help: "Time from the agent's having read an event of the CNI plugin to its answer.",
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 20},
		}, []string{"command"}),
		repairs:        counter("repairs_total", "What an audit found to differ from what was meant, and put right, by part.", "part"),
		repairFailures: counter("repair_failures_total", "Audits that could not look at something, or not put it right.", "subject"),
		auditSeconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Namespace: namespace, Name: "audit_duration_seconds", Help: "Time of one audit, of a pod or of the host's rule and set, repair included.",
			Buckets: []float64{.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 10},
		}, []string{"subject"}),
		lateEnrolments: prometheus.NewCounter(prometheus.CounterOpts{
			Namespace: namespace, Name: "running_pods_enrolled_total",
			Help: "Pods enrolled while they ran already: by a change of a label, or started while no agent ran.",
		}),
	}
	var errs []error
	for _, c := range []prometheus.Collector{m.requests, m.requestSeconds, m.repairs, m.repairFailures, m.auditSeconds, m.lateEnrolments, newStatusCollector(status)} {
		errs = append(errs, m.registry.Register(c))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("registering metrics: %w", err)
	}
	// A counter that begins at 1 has not increased, for rate() and increase(): the first would be missed.
	for _, part := range []string{"netns", "redirection", "identity", "node proxy", "host probes"} {
		m.repairs.WithLabelValues(part)
	}
	for _, subject := range []string{"pod", "host"} {
		m.repairFailures.WithLabelValues(subject)
	}
	return m, nil
}

// CNIRequest counts an event of the CNI plugin. code is 0 unless the answer was a CNI
// error.
func (m *Metrics) CNIRequest(command, result string, code uint, took time.Duration) {
	text := ""
	if code != 0 {
		text = strconv.FormatUint(uint64(code), 10)
	}
	m.requests.WithLabelValues(command, result, text).Inc()
	m.requestSeconds.WithLabelValues(command).Observe(took.Seconds())
}

// Audited counts an audit of a subject, "pod" or "host".
func (m *Metrics) Audited(subject string, took time.Duration) {
	m.auditSeconds.WithLabelValues(subject).Observe(took.Seconds())
}

// Repaired counts the repair of one part.
func (m *Metrics) Repaired(part string) { m.repairs.WithLabelValues(part).Inc() }

// RepairFailed counts an audit of a subject that did not come to its end.
func (m *Metrics) RepairFailed(subject string) { m.repairFailures.WithLabelValues(subject).Inc() }

// EnrolledRunning counts a pod that was enrolled while it ran.
func (m *Metrics) EnrolledRunning() { m.lateEnrolments.Inc() }

// Handler serves the metrics.
func (m *Metrics) Handler(logger *slog.Logger) http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{
		ErrorLog:            slog.NewLogLogger(logger.Handler(), slog.LevelWarn),
		MaxRequestsInFlight: maxScrapes,
		Timeout:             scrapeTimeout,
	})
}

// statusCollector derives gauges from the status.
type statusCollector struct {
	status func() Status

	info, ready, pods, malformed, proxies, identities, expiry *prometheus.Desc
}

func newStatusCollector(status func() Status) *statusCollector {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(prometheus.BuildFQName(namespace, "", name), help, labels, nil)
	}
	return &statusCollector{
		status:     status,
		info:       desc("info", "1, with the agent's version and what programs packet rules.", "version", "backend"),
		ready:      desc("ready", "1 when sockets listen, pods are known and the CA can be used."),
		pods:       desc("pods", "Pods in the mesh or on their way in, by state.", "state"),
		malformed:  desc("pods_malformed_options", "Pods of which an annotation counts as absent."),
		proxies:    desc("node_proxies", "Connected node proxies; ready are those that have acked their snapshot.", "ready"),
		identities: desc("identities", "Registered identities, by the state of their certificate.", "state"),
		expiry:     desc("certificate_expiry_min_timestamp_seconds", "When the first of the certificates held ends, in Unix time; absent without any."),
	}
}

// Describe is part of prometheus.Collector.
func (c *statusCollector) Describe(descs chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.info, c.ready, c.pods, c.malformed, c.proxies, c.identities, c.expiry} {
		descs <- d
	}
}

// Collect is part of prometheus.Collector.
func (c *statusCollector) Collect(metrics chan<- prometheus.Metric) {
	s := c.status()
	gauge := func(desc *prometheus.Desc, value float64, labels ...string) {
		metrics <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, labels...)
	}
	gauge(c.info, 1, s.Version, s.Redirection.Backend)
	gauge(c.ready, map[bool]float64{true: 1}[s.Ready])
	c.collectPods(s.Pods, gauge)
	c.collectIdentities(s.Identities, gauge)
	ready := map[bool]int{}
	for _, proxy := range s.Proxies {
		ready[proxy.Ready]++
	}
	for _, state := range []bool{true, false} {
		gauge(c.proxies, float64(ready[state]), strconv.FormatBool(state))
	}
}

func (c *statusCollector) collectPods(pods []PodStatus, gauge func(*prometheus.Desc, float64, ...string)) {
	// All states are there, at 0 if need be: a series that comes and goes cannot be watched.
	states := map[string]int{PodEnrolled: 0, PodEnrolling: 0, PodDegraded: 0}
	malformed := 0
	for _, pod := range pods {
		states[pod.State]++
		if len(pod.MalformedOptions) > 0 {
			malformed++
		}
	}
	for state, count := range states {
		gauge(c.pods, float64(count), state)
	}
	gauge(c.malformed, float64(malformed))
}

func (c *statusCollector) collectIdentities(identities []IdentityStatus, gauge func(*prometheus.Desc, float64, ...string)) {
	states := map[string]int{CertificateReady: 0, CertificatePending: 0, CertificateDenied: 0}
	var first time.Time
	for _, id := range identities {
		states[id.State]++
		if !id.NotAfter.IsZero() && (first.IsZero() || id.NotAfter.Before(first)) {
			first = id.NotAfter
		}
	}
	for state, count := range states {
		gauge(c.identities, float64(count), state)
	}
	if !first.IsZero() {
		gauge(c.expiry, float64(first.UnixMilli())/1e3)
	}
}
