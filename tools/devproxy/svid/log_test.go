// SPDX-License-Identifier: Apache-2.0

package svid_test

import (
	"bytes"
	"context"
	"log/slog"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	secretv3 "github.com/envoyproxy/go-control-plane/envoy/service/secret/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"ambientd/tools/devproxy/svid"
)

// Without an agent no stream begins: the store says once what it waits for.
func TestWaitingForSecretsIsLoggedOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "sds.sock")
	synctest.Test(t, func(t *testing.T) {
		conn, err := grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		var log bytes.Buffer
		store := svid.New(svid.Config{Client: secretv3.NewSecretDiscoveryServiceClient(conn), Logger: slog.New(slog.NewTextHandler(&log, nil))})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- store.Run(ctx) }()
		time.Sleep(10 * time.Minute)
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run = %v", err)
		}
		lines := strings.Split(strings.TrimSpace(log.String()), "\n")
		if len(lines) != 1 || !strings.Contains(lines[0], `level=INFO msg="waiting for secrets" resource=ROOTCA`) || !strings.Contains(lines[0], path) {
			t.Errorf("got the log\n%s\nwant one line that names %s", log.String(), path)
		}
	})
}
