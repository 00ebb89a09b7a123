// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/netip"
	"slices"
	"time"
)

// The paths of operations. Each takes JSON by POST and answers with JSON.
const (
	verifyPath   = "/v1/verify"
	withdrawPath = "/v1/withdraw"
	enrolPath    = "/v1/enrol"
)

// operationTimeout bounds an operation: the iptables backend needs 20 ms and more for
// each pod.
const operationTimeout = 2 * time.Minute

// maxRequestBytes bounds the body of a request: the names of some 4,000 pods.
const maxRequestBytes = 1 << 20

// Operations are what an operator can ask the agent to do. An error that wraps
// [ErrNoSuchPod] is the operator's mistake.
type Operations interface {
	// Verify compares pods and the host's rule with the kernel, and puts right what
	// differs.
	Verify(ctx context.Context, req VerifyRequest) (VerifyResult, error)
	// Withdraw takes pods out of the mesh, to stay out until Enrol or the agent's restart.
	Withdraw(ctx context.Context, pods Selection) (Outcome, error)
	// Enrol lets pods back in that were withdrawn; those that belong there are enrolled
	// soon after.
	Enrol(ctx context.Context, pods Selection) (Outcome, error)
}

// ErrNoSuchPod says that an operator named a pod that is not there.
var ErrNoSuchPod = errors.New("no such pod on this node; name it as NAMESPACE/NAME, or by its UID")

// Selection is which pods an operation is for: all, or those named by UID or as
// "namespace/name". Exactly one of the two is given.
type Selection struct {
	All  bool     `json:"all,omitempty"`
	Pods []string `json:"pods,omitempty"`
}

// Validate returns an error unless exactly one of the two is given, and each name is one.
func (s Selection) Validate() error {
	if s.All != (len(s.Pods) == 0) {
		return errors.New("either pods are named, or all are meant")
	}
	return checkNames(s.Pods)
}

// checkNames refuses what would be an error about nobody.
func checkNames(pods []string) error {
	if slices.Contains(pods, "") {
		return errors.New(`a pod is named "": name it as NAMESPACE/NAME, or by its UID`)
	}
	return nil
}

// Outcome is what came of an operation.
type Outcome struct {
	Pods  []string `json:"pods"`            // "namespace/name", sorted
	Error string   `json:"error,omitempty"` // what did not work in some of them
}

// VerifyRequest is what is to be compared.
type VerifyRequest struct {
	Pods   []string `json:"pods,omitempty"`   // as in Selection; none means all that are enrolled
	Probes bool     `json:"probes,omitempty"` // open a connection from the host to each pod, too
}

// VerifyResult is what was found.
type VerifyResult struct {
	Pods []PodFinding `json:"pods"` // sorted
	Host HostFinding  `json:"host"`
}

// PodFinding is what was found in one pod.
type PodFinding struct {
	Pod         string         `json:"pod"` // "namespace/name"
	UID         string         `json:"uid,omitempty"`
	Differences []string       `json:"differences"` // from what was meant; they have been put right unless Error says otherwise
	Error       string         `json:"error,omitempty"`
	Probes      []ProbeFinding `json:"probes,omitempty"` // if asked for, one for each family that the pod has an address of
}

// HostFinding is what was found of the host's rule and set.
type HostFinding struct {
	Differences []string `json:"differences"`
	Error       string   `json:"error,omitempty"`
}

// ProbeFinding is whose a connection from the host seemed to be when it arrived in a pod.
type ProbeFinding struct {
	Address netip.Addr `json:"address"` // of the pod
	Want    netip.Addr `json:"want"`    // the probe source
	Got     netip.Addr `json:"got,omitzero"`
	Error   string     `json:"error,omitempty"` // why it did not arrive
	Checked time.Time  `json:"checked"`
}

// OK says whether the connection arrived with the probe source.
func (p ProbeFinding) OK() bool { return p.Error == "" && p.Got == p.Want }

// String says for an operator what was seen.
func (p ProbeFinding) String() string {
	switch {
	case p.Error != "":
		return fmt.Sprintf("a connection from the host to %s does not arrive: %s", p.Address, p.Error)
	case p.Got != p.Want:
		return fmt.Sprintf("a connection from the host to %s arrives from %s, want %s", p.Address, p.Got, p.Want)
	default:
		return fmt.Sprintf("a connection from the host to %s arrives from %s", p.Address, p.Got)
	}
}

// OK says whether nothing differed, nothing failed and all probes arrived as they should.
func (f PodFinding) OK() bool {
	for _, p := range f.Probes {
		if !p.OK() {
			return false
		}
	}
	return f.Error == "" && len(f.Differences) == 0
}

// OK says whether nothing differed and nothing failed.
func (f HostFinding) OK() bool { return f.Error == "" && len(f.Differences) == 0 }

// OK says whether nothing differed anywhere.
func (r VerifyResult) OK() bool {
	for _, pod := range r.Pods {
		if !pod.OK() {
			return false
		}
	}
	return r.Host.OK()
}

// withLists returns r with [] where JSON would show null.
func (r VerifyResult) withLists() VerifyResult {
	pods := make([]PodFinding, 0, len(r.Pods))
	for _, pod := range r.Pods {
		pod.Differences = list(pod.Differences)
		pods = append(pods, pod)
	}
	r.Pods, r.Host.Differences = pods, list(r.Host.Differences)
	return r
}

// failure is the body of an answer that is no success.
type failure struct {
	Error string `json:"error"`
}

// handleOperations adds the operations to mux.
func handleOperations(mux *http.ServeMux, ops Operations, logger *slog.Logger) {
	mux.HandleFunc("POST "+verifyPath, operation(logger, func(ctx context.Context, req VerifyRequest) (VerifyResult, error) {
		if err := checkNames(req.Pods); err != nil {
			return VerifyResult{}, &requestError{code: http.StatusBadRequest, err: err}
		}
		result, err := ops.Verify(ctx, req)
		return result.withLists(), err
	}))
	selected := func(do func(context.Context, Selection) (Outcome, error)) func(context.Context, Selection) (Outcome, error) {
		return func(ctx context.Context, pods Selection) (Outcome, error) {
			if err := pods.Validate(); err != nil {
				return Outcome{}, &requestError{code: http.StatusBadRequest, err: err}
			}
			outcome, err := do(ctx, pods)
			outcome.Pods = list(outcome.Pods)
			return outcome, err
		}
	}
	mux.HandleFunc("POST "+withdrawPath, operation(logger, selected(ops.Withdraw)))
	mux.HandleFunc("POST "+enrolPath, operation(logger, selected(ops.Enrol)))
}

// requestError is a request that is answered with an HTTP status of its own.
type requestError struct {
	code int
	err  error
}

func (e *requestError) Error() string { return e.err.Error() }
func (e *requestError) Unwrap() error { return e.err }

// operation serves one operation.
func operation[Req, Res any](logger *slog.Logger, do func(context.Context, Req) (Res, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		req, err := readBody[Req](w, r)
		var res Res
		if err == nil {
			ctx, cancel := context.WithTimeout(r.Context(), operationTimeout)
			defer cancel()
			// The server's own limit is for what is answered from memory.
			if err = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(operationTimeout + writeTimeout)); err == nil {
				res, err = do(ctx, req)
			}
		}
		var body any = res
		code := http.StatusOK
		if err != nil {
			code, body = codeOf(err), failure{Error: err.Error()}
		}
		content, err := json.Marshal(body)
		if err != nil {
			logger.Error("an answer cannot be encoded", "path", r.URL.Path, "err", err)
			http.Error(w, "the answer cannot be encoded", http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(code)
		answer(w, content, logger)
	}
}

func codeOf(err error) int {
	if e, ok := errors.AsType[*requestError](err); ok {
		return e.code
	}
	if errors.Is(err, ErrNoSuchPod) {
		return http.StatusNotFound
	}
	return http.StatusInternalServerError
}

// readBody reads one JSON value, strictly.
func readBody[T any](w http.ResponseWriter, r *http.Request) (value T, err error) {
	decoder := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxRequestBytes))
	decoder.DisallowUnknownFields()
	if err = decoder.Decode(&value); err == nil {
		if _, rest := decoder.Token(); !errors.Is(rest, io.EOF) {
			err = errors.New("something follows the JSON value")
		}
	}
	if err == nil {
		return value, nil
	}
	code := http.StatusBadRequest
	if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
		code = http.StatusRequestEntityTooLarge
	}
	return value, &requestError{code: code, err: fmt.Errorf("reading the request: %w", err)}
}
