// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"syscall"
)

// maxAnswerBytes bounds what is read of an answer: the status of some 100,000 pods.
const maxAnswerBytes = 64 << 20

// Fetch asks the agent behind the unix socket for its status. Its errors, as those of
// the functions below, say what to look at next, and wrap the cause.
func Fetch(ctx context.Context, socket string) (Status, error) {
	var status Status
	err := ask(ctx, socket, question{method: http.MethodGet, path: statusPath, subject: "its status"}, &status)
	return status, err
}

// Verify asks the agent to compare pods with the kernel and to put right what differs.
func Verify(ctx context.Context, socket string, req VerifyRequest) (VerifyResult, error) {
	var result VerifyResult
	err := ask(ctx, socket, question{method: http.MethodPost, path: verifyPath, subject: "a comparison", body: req}, &result)
	return result, err
}

// Withdraw asks the agent to take pods out of the mesh and to keep them out.
func Withdraw(ctx context.Context, socket string, pods Selection) (Outcome, error) {
	return operate(ctx, socket, question{method: http.MethodPost, path: withdrawPath, subject: "the withdrawal of pods", body: pods})
}

// Enrol asks the agent to let withdrawn pods back in.
func Enrol(ctx context.Context, socket string, pods Selection) (Outcome, error) {
	return operate(ctx, socket, question{method: http.MethodPost, path: enrolPath, subject: "the enrolment of pods", body: pods})
}

func operate(ctx context.Context, socket string, q question) (Outcome, error) {
	var outcome Outcome
	err := ask(ctx, socket, q, &outcome)
	if err == nil && outcome.Error != "" {
		err = errors.New(outcome.Error)
	}
	return outcome, err
}

// question is a request, and what it is about in words.
type question struct {
	method, path, subject string
	body                  any // nil for none
}

// ask puts a question to the agent and decodes the answer into target.
func ask(ctx context.Context, socket string, q question, target any) error {
	var body io.Reader = http.NoBody
	if q.body != nil {
		content, err := json.Marshal(q.body)
		if err != nil {
			return fmt.Errorf("asking for %s: %w", q.subject, err)
		}
		body = bytes.NewReader(content)
	}
	transport := &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		},
	}
	// The host is never looked up; HTTP/1.1 wants one.
	req, err := http.NewRequestWithContext(ctx, q.method, "http://ambientd"+q.path, body)
	if err != nil {
		return fmt.Errorf("asking for %s: %w", q.subject, err)
	}
	resp, err := transport.RoundTrip(req)
	if err != nil {
		return fmt.Errorf("asking the agent on %s for %s: %w%s", socket, q.subject, err, advice(err))
	}
	err = read(resp, target)
	closed := resp.Body.Close()
	if refusal, ok := errors.AsType[*refusal](err); ok {
		return refusal
	}
	if err := errors.Join(err, closed); err != nil {
		return fmt.Errorf("reading what the agent on %s answers about %s: %w", socket, q.subject, err)
	}
	return nil
}

// refusal is the agent's own word on why it does not do what it was asked for. It needs no words
// on how it came here.
type refusal struct{ text string }

// Error is the agent's text.
func (r *refusal) Error() string { return r.text }

func read(resp *http.Response, target any) error {
	body := io.LimitReader(resp.Body, maxAnswerBytes)
	if resp.StatusCode == http.StatusOK {
		return json.NewDecoder(body).Decode(target)
	}
	var told failure
	if json.NewDecoder(body).Decode(&told) == nil && told.Error != "" {
		return &refusal{text: told.Error}
	}
	return fmt.Errorf("it answered %s", resp.Status)
}

// advice says what an operator does about err.
func advice(err error) string {
	switch {
	case errors.Is(err, syscall.ENOENT), errors.Is(err, syscall.ECONNREFUSED):
		return "; is ambientd running?"
	case errors.Is(err, syscall.EACCES), errors.Is(err, io.EOF), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return "; only root may ask"
	}
	return ""
}
