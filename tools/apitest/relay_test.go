// SPDX-License-Identifier: Apache-2.0

package apitest

import (
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// A relay passes both ways, counts one of them, and its kubeconfig is of whoever has the
// token.
func TestOpenRelay(t *testing.T) {
	const answer = "an answer of 24 letters!"
	server, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	asked := make(chan string, 1)
	go func() {
		conn, err := server.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		question := make([]byte, len("question"))
		if _, err := io.ReadFull(conn, question); err == nil {
			asked <- string(question)
			_, _ = io.WriteString(conn, answer) // whoever reads it sees what is missing
		}
	}()
	dir := t.TempDir()
	kubeconfig := filepath.Join(dir, "admin")
	content := fmt.Sprintf(`{"clusters": [{"cluster": {"server": "https://%s"}}], "users": [{"user": {"client-key-data": "a2V5"}}]}`, server.Addr())
	if err := os.WriteFile(kubeconfig, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	relay, path, err := OpenRelay(kubeconfig, dir, "a-token")
	if err != nil {
		t.Fatal(err)
	}
	defer relay.Close()
	text, err := os.ReadFile(path)
	if err != nil || !strings.Contains(string(text), "a-token") || strings.Contains(string(text), "client-key-data") {
		t.Errorf("the kubeconfig is %s (%v)", text, err)
	}
	conn, err := net.Dial("tcp", relay.address)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, "question"); err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(conn)
	if err != nil || string(got) != answer || <-asked != "question" {
		t.Errorf("the answer is %q (%v)", got, err)
	}
	if relay.Answered() != int64(len(answer)) {
		t.Errorf("%d bytes were counted, want %d", relay.Answered(), len(answer))
	}
}
