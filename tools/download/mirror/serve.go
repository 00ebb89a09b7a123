// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"
)

// The servers, as the log calls them.
const (
	named = "named" // what the tests' base URLs name
	other = "other" // another host
	plain = "plain" // without TLS
)

// mirror is what the three servers share.
type mirror struct {
	files string

	mu    sync.Mutex
	log   io.Writer
	asked map[string]int // how often each path was
	ports []string
}

func (m *mirror) setPorts(ports []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.ports = ports
}

// entry is a line of the log.
type entry struct {
	Server        string `json:"server"`
	Path          string `json:"path"`
	Query         string `json:"query"`
	Authorization string `json:"authorization"`
	Range         string `json:"range"`
	IfRange       string `json:"if_range"`
}

// note writes the log, and returns how often the path was asked for, this time included.
func (m *mirror) note(server string, r *http.Request) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	//nolint:errchkjson // strings only
	line, _ := json.Marshal(entry{
		Server: server, Path: r.URL.Path, Query: r.URL.RawQuery, Authorization: r.Header.Get("Authorization"),
		Range: r.Header.Get("Range"), IfRange: r.Header.Get("If-Range"),
	})
	fmt.Fprintf(m.log, "%s\n", line)
	m.asked[r.URL.Path]++
	return m.asked[r.URL.Path]
}

// behaviour is what the first segment of a path asks for, "KEY=VALUE,KEY=VALUE".
type behaviour map[string]string

func parseBehaviour(segment string) behaviour {
	b := behaviour{}
	for word := range strings.SplitSeq(segment, ",") {
		key, value, _ := strings.Cut(word, "=")
		b[key] = value
	}
	return b
}

func (b behaviour) number(key string) int {
	n, err := strconv.Atoi(b[key])
	if err != nil {
		return 0
	}
	return n
}

// applies: without "times", always; else for so many requests.
func (b behaviour) applies(asked int) bool {
	_, limited := b["times"]
	return !limited || asked <= b.number("times")
}

func (m *mirror) handler(server string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked := m.note(server, r)
		_, rest, _ := strings.Cut(r.URL.Path, "/")
		how, rest, _ := strings.Cut(rest, "/")
		// Istio's own mirrors have paths of their own.
		if how == "istio-build" {
			how, rest = "ok", r.URL.Path
		}
		m.answer(w, r, parseBehaviour(how), rest, asked)
	})
}

func (m *mirror) answer(w http.ResponseWriter, r *http.Request, b behaviour, file string, asked int) {
	if _, ok := b["private"]; ok && !m.knows(r.Header.Get("Authorization"), file) {
		http.Error(w, "who are you?", http.StatusUnauthorized)
		return
	}
	if after, ok := b["retry-after"]; ok {
		if after == "date" {
			after = time.Now().Add(9 * time.Second).UTC().Format(http.TimeFormat)
		}
		w.Header().Set("Retry-After", after)
	}
	if code := b.number("status"); code != 0 && b.applies(asked) {
		w.WriteHeader(code)
		fmt.Fprintf(w, "<html>%d</html>", code)
		return
	}
	if to, ok := b["redirect"]; ok {
		m.redirect(w, to, file)
		return
	}
	if _, ok := b["html"]; ok {
		w.Header().Set("Content-Type", "text/html")
		fmt.Fprint(w, "<!DOCTYPE html><title>Sign in</title><p>\x1b[31mWho are you?")
		return
	}
	if _, ok := b["endless"]; ok {
		endless(w)
		return
	}
	content, err := os.ReadFile(filepath.Join(m.files, filepath.Clean("/"+file)))
	if err != nil {
		http.NotFound(w, r)
		return
	}
	m.serve(w, r, b, content, asked)
}

// knows: whether the token is the one in the file "token" beside the file.
func (m *mirror) knows(authorization, file string) bool {
	want, err := os.ReadFile(filepath.Join(m.files, filepath.Clean("/"+filepath.Dir(file)), "token"))
	return err == nil && authorization == "Bearer "+strings.TrimSpace(string(want))
}

// redirect sends on to the same file, with a query that is a credential.
func (m *mirror) redirect(w http.ResponseWriter, to, file string) {
	m.mu.Lock()
	ports := m.ports
	m.mu.Unlock()
	target := map[string]string{
		"same":   "https://localhost:" + ports[0] + "/ok/",
		"other":  "https://127.0.0.1:" + ports[1] + "/ok/",
		"back":   "https://127.0.0.1:" + ports[1] + "/redirect=same/",
		"cut":    "https://127.0.0.1:" + ports[1] + "/cut=100000,times=1/",
		"denied": "https://127.0.0.1:" + ports[1] + "/status=403/",
		"plain":  "http://localhost:" + ports[2] + "/ok/",
		"file":   "file:///etc/",
		"loop":   "https://localhost:" + ports[0] + "/redirect=loop/",
	}[to]
	w.Header().Set("Location", target+file+"?X-Signature=presigned-secret")
	w.WriteHeader(http.StatusFound)
	fmt.Fprint(w, "<html>over there</html>")
}

// serve sends the content, or as much of it as is wanted.
func (m *mirror) serve(w http.ResponseWriter, r *http.Request, b behaviour, content []byte, asked int) {
	if _, ok := b["change"]; ok {
		// Another file from the second time on.
		if asked > 1 {
			content = bytes.ReplaceAll(content, []byte("first"), []byte("other"))
		}
	}
	if n := b.number("shorter"); n != 0 && asked > 1 {
		content = content[n:]
	}
	if b["etag"] != "no" {
		sum := sha256.Sum256(content)
		w.Header().Set("ETag", fmt.Sprintf(`"%x"`, sum[:4]))
	}
	if b["ranges"] == "no" {
		r.Header.Del("Range")
	}
	if _, ok := b["nolength"]; ok {
		r.Header.Del("Range")
		w.Header().Set("Transfer-Encoding", "identity")
		if _, err := w.Write(content); err != nil { //nolint:gosec // the test's own file, for curl
			panic(http.ErrAbortHandler)
		}
		return
	}
	if _, ok := b["cut"]; ok && b.applies(asked) {
		w = &cutter{ResponseWriter: w, left: b.number("cut")}
	}
	if _, ok := b["hang"]; ok && b.applies(asked) {
		w = &cutter{ResponseWriter: w, left: b.number("hang"), until: r.Context().Done()}
	}
	var modified time.Time
	if _, ok := b["modified"]; ok {
		modified = time.Unix(1e9, 0)
	}
	http.ServeContent(w, r, "", modified, bytes.NewReader(content))
}

// cutter closes the connection after so many bytes of the body, or falls silent until the
// client is gone.
type cutter struct {
	http.ResponseWriter

	left  int
	until <-chan struct{}
}

func (c *cutter) Write(p []byte) (int, error) {
	if len(p) <= c.left {
		c.left -= len(p)
		return c.ResponseWriter.Write(p)
	}
	_, err := c.ResponseWriter.Write(p[:c.left])
	if err != nil {
		return 0, err
	}
	if err := http.NewResponseController(c.ResponseWriter).Flush(); err != nil {
		return 0, err
	}
	if c.until != nil {
		<-c.until
	}
	panic(http.ErrAbortHandler)
}

// endless never ends, and says no size.
func endless(w http.ResponseWriter) {
	block := make([]byte, 1<<16)
	for {
		if _, err := w.Write(block); err != nil {
			return
		}
	}
}
