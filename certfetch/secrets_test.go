// SPDX-License-Identifier: Apache-2.0

package certfetch_test

import (
	"bytes"
	"crypto/ecdsa"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"go/parser"
	"go/token"
	"log/slog"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"

	"ambientd/certfetch"
	"ambientd/certfetch/catest"
)

// Case 24, where it is decided: what handles keys cannot write a file, because it imports nothing
// that can. Logs are the owner's business, who passes a logger in.
func TestPackagesThatHandleKeysCannotWriteFiles(t *testing.T) {
	for _, folder := range []string{".", "ca", "sds"} {
		files, err := filepath.Glob(filepath.Join(folder, "*.go"))
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: %d files, %v", folder, len(files), err)
		}
		for _, file := range files {
			if strings.HasSuffix(file, "_test.go") {
				continue
			}
			parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ImportsOnly)
			if err != nil {
				t.Fatal(err)
			}
			for _, spec := range parsed.Imports {
				path, err := strconv.Unquote(spec.Path.Value)
				if err != nil {
					t.Fatal(err)
				}
				switch path {
				case "os", "io/ioutil", "syscall", "golang.org/x/sys/unix", "os/exec":
					t.Errorf("%s imports %s: no private key may ever reach a file", file, path)
				}
			}
		}
	}
}

// Nothing that prints a certificate prints its key.
func TestSVIDDoesNotPrintItsKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := start(t, catest.New(t), certfetch.Config{})
		svid := await(t, f, "pod-1", account(t, "a"))
		secret, err := svid.Key.(*ecdsa.PrivateKey).Bytes()
		if err != nil {
			t.Fatal(err)
		}
		var logged bytes.Buffer
		slog.New(slog.NewJSONHandler(&logged, nil)).Info("json", "svid", svid, "value", *svid)
		slog.New(slog.NewTextHandler(&logged, nil)).Info("text", "svid", svid, "value", *svid)
		encoded, err := json.Marshal(svid)
		if err != nil {
			t.Fatal(err)
		}
		number := svid.Key.(*ecdsa.PrivateKey).D.String() //nolint:staticcheck // as a careless %v would print it
		for name, text := range map[string]string{
			"%v": fmt.Sprintf("%v", svid), "%+v": fmt.Sprintf("%+v", *svid), "%#v": fmt.Sprintf("%#v", svid), "%s": fmt.Sprintf("%s", []any{*svid}),
			"%#v of the value": fmt.Sprintf("%#v", *svid), "in a struct": fmt.Sprintf("%+v", struct{ S *certfetch.SVID }{svid}),
			"slog": logged.String(), "JSON": string(encoded),
		} {
			if strings.Contains(text, number) || strings.Contains(strings.ToLower(text), hex.EncodeToString(secret)) {
				t.Errorf("%s shows the key: %s", name, text)
			}
			if !strings.Contains(text, svid.ID.String()) && name != "in a struct" {
				t.Errorf("%s does not name the identity: %.200s", name, text)
			}
		}
	})
}
