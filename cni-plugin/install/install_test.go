// SPDX-License-Identifier: Apache-2.0

package install

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ambientd/tools/netnstest"
)

const (
	single  = `{"cniVersion":"1.0.0","name":"n","type":"bridge","mtu":1500}`
	chainOf = `{"cniVersion":"1.0.0","name":"n","plugins":[{"type":"bridge","mtu":1500}]}`
	chained = `{"cniVersion":"1.0.0","name":"n","plugins":[{"type":"bridge","mtu":1500},{"type":"ambient-cni"}]}`
)

// node is a machine's directories.
type node struct {
	t   *testing.T
	cfg Config
}

func newNode(t *testing.T) *node {
	t.Helper()
	dir := t.TempDir()
	n := &node{t: t, cfg: Config{BinDir: filepath.Join(dir, "bin"), ConfDir: filepath.Join(dir, "net.d"), Plugin: filepath.Join(dir, "new")}}
	must(t, errors.Join(os.Mkdir(n.cfg.BinDir, 0o755), os.Mkdir(n.cfg.ConfDir, 0o755), os.WriteFile(n.cfg.Plugin, []byte("plugin 1"), 0o600)))
	return n
}

func (n *node) conf(name string) string { return filepath.Join(n.cfg.ConfDir, name) }

func (n *node) put(name, content string) {
	n.t.Helper()
	must(n.t, os.WriteFile(n.conf(name), []byte(content), 0o640))
}

func (n *node) install() Result {
	n.t.Helper()
	result, err := Install(n.t.Context(), n.cfg)
	must(n.t, err)
	return result
}

// want compares the directory of configurations with names and contents.
func (n *node) want(files map[string]string) {
	n.t.Helper()
	entries, err := os.ReadDir(n.cfg.ConfDir)
	must(n.t, err)
	for _, entry := range entries {
		want, ok := files[entry.Name()]
		if got := string(readFile(n.t, n.conf(entry.Name()))); !ok || got != want {
			n.t.Errorf("%s: %s, want %q", entry.Name(), got, want)
		}
	}
	if len(entries) != len(files) {
		n.t.Errorf("%d files, want %d", len(entries), len(files))
	}
}

// inodes identify all files, with what they hold.
func (n *node) inodes() (all []uint64) {
	n.t.Helper()
	must(n.t, filepath.Walk(filepath.Dir(n.cfg.BinDir), func(_ string, info os.FileInfo, err error) error {
		if err == nil {
			all = append(all, info.Sys().(*syscall.Stat_t).Ino, uint64(info.ModTime().UnixNano()))
		}
		return err
	}))
	return all
}

// TestInstall: binary and entry, and again without a change; the file keeps mode and others' bytes.
func TestInstall(t *testing.T) {
	n := newNode(t)
	n.put("10-a.conflist", chainOf)
	n.put("20-b.conflist", chainOf)
	want := Result{Binary: filepath.Join(n.cfg.BinDir, "ambient-cni"), Conflist: n.conf("10-a.conflist"), BinaryWritten: true, ConflistWritten: true}
	if got := n.install(); got.Binary != want.Binary || got.Conflist != want.Conflist || !got.BinaryWritten || !got.ConflistWritten {
		t.Errorf("result: %+v, want %+v", got, want)
	}
	n.want(map[string]string{"10-a.conflist": chained, "20-b.conflist": chainOf})
	if info, err := os.Stat(n.conf("10-a.conflist")); err != nil || info.Mode() != 0o640 {
		t.Errorf("the list's mode: %v, %v", info.Mode(), err)
	}
	if info, err := os.Stat(want.Binary); err != nil || info.Mode() != 0o755 {
		t.Errorf("the binary's mode: %v, %v", info.Mode(), err)
	}
	before := n.inodes()
	for range 2 {
		if got := n.install(); got.BinaryWritten || got.ConflistWritten {
			t.Errorf("again: %+v", got)
		}
	}
	if !slices.Equal(before, n.inodes()) {
		t.Error("a second installation wrote something")
	}
	changed, err := Uninstall(n.cfg)
	must(t, err)
	if !slices.Equal(changed, []string{n.conf("10-a.conflist"), want.Binary}) {
		t.Errorf("uninstalled: %q; entries go first, the binary last", changed)
	}
	n.want(map[string]string{"10-a.conflist": chainOf, "20-b.conflist": chainOf})
	if changed, err := Uninstall(n.cfg); err != nil || len(changed) > 0 {
		t.Errorf("again: %q, %v", changed, err)
	}
}

// TestOwnerRewrites is the start of case 3: after the owner has written its file anew, in place or by
// rename, the next installation chains ours once, last, and leaves the rest.
func TestOwnerRewrites(t *testing.T) {
	const anew = `{"cniVersion":"1.1.0","name":"n","plugins":[{"type":"bridge","mtu":9000},{"type":"portmap"}],"x":1.50}`
	const want = `{"cniVersion":"1.1.0","name":"n","plugins":[{"type":"bridge","mtu":9000},{"type":"portmap"},{"type":"ambient-cni"}],"x":1.50}`
	for how, rewrite := range map[string]func(n *node){
		"in place": func(n *node) { n.put("10-a.conflist", anew) },
		"rename": func(n *node) {
			n.put("new", anew)
			must(n.t, os.Rename(n.conf("new"), n.conf("10-a.conflist")))
		},
	} {
		t.Run(how, func(t *testing.T) {
			n := newNode(t)
			n.put("10-a.conflist", chainOf)
			n.install()
			rewrite(n)
			n.install()
			n.want(map[string]string{"10-a.conflist": want})
		})
	}
}

// TestSettings: other settings replace the entry.
func TestSettings(t *testing.T) {
	n := newNode(t)
	n.put("10-a.conflist", chainOf)
	n.install()
	n.cfg.Entry = Entry{RunDir: "/r", OwnPods: []string{}, StrictStatus: true}
	n.install()
	n.want(map[string]string{"10-a.conflist": strings.Replace(chained, `"ambient-cni"`, `"ambient-cni","runDir":"/r","ownPods":[],"strictStatus":true`, 1)})
}

// TestFirstFileCounts is case 4: our plugin is chained once, in the file that the runtime loads.
func TestFirstFileCounts(t *testing.T) {
	n := newNode(t)
	n.put("10-a.conflist", chainOf)
	n.install()
	n.put("00-new.conflist", strings.Replace(chainOf, "1500", "9000", 1))
	if result := n.install(); !slices.Equal(result.Left, []string{n.conf("10-a.conflist")}) {
		t.Errorf("left: %q", result.Left)
	}
	n.want(map[string]string{"00-new.conflist": strings.Replace(chained, "1500", "9000", 1), "10-a.conflist": chainOf})
}

const listed = "{\n  \"cniVersion\": \"1.0.0\",\n  \"name\": \"n\",\n  \"plugins\": [\n    " + single + ",\n    {\"type\":\"ambient-cni\"}\n  ]\n}\n"

// TestSingle is the rest of case 4: a .conf alone, or a .json, becomes a list that keeps the original
// plugin first, a reinstallation changes nothing, and it is there again afterwards.
func TestSingle(t *testing.T) {
	for _, name := range []string{"10-a.conf", "10-a.json"} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.put(name, "\n"+single+"\n")
			n.install()
			n.want(map[string]string{name + ".ambientd-saved": "\n" + single + "\n", "10-a.conflist": listed})
			before := n.inodes()
			n.install()
			n.install()
			if !slices.Equal(before, n.inodes()) {
				t.Error("a reinstallation wrote something")
			}
			_, err := Uninstall(n.cfg)
			must(t, err)
			n.want(map[string]string{name: "\n" + single + "\n"})
		})
	}
}

// TestSingleMeetsOthers: what else may be there when a single plugin's configuration becomes a list.
func TestSingleMeetsOthers(t *testing.T) {
	t.Run("the owner writes it anew", func(t *testing.T) {
		n := newNode(t)
		n.put("10-a.conf", single)
		n.install()
		anew := strings.Replace(single, "1500", "9000", 1)
		n.put("10-a.conf", anew)
		n.install()
		n.want(map[string]string{"10-a.conf.ambientd-saved": anew, "10-a.conflist": strings.Replace(listed, "1500", "9000", 1)})
		n.put("10-a.conf", single) // and again, before we go
		_, err := Uninstall(n.cfg)
		must(t, err)
		n.want(map[string]string{"10-a.conf": single})
	})
	t.Run("the owner has a list of that name", func(t *testing.T) {
		n := newNode(t)
		n.put("10-a.conf", single)
		n.put("10-a.conflist", chainOf)
		n.install()
		n.want(map[string]string{"10-a.conf.ambientd-saved": single, "10-a.conf.conflist": listed, "10-a.conflist": chainOf})
		_, err := Uninstall(n.cfg)
		must(t, err)
		n.want(map[string]string{"10-a.conf": single, "10-a.conflist": chainOf})
	})
	t.Run("an installation that was killed between its two steps", func(t *testing.T) {
		n := newNode(t)
		n.put("10-a.conf", single)
		n.put("10-a.conflist", listed)
		n.install()
		n.want(map[string]string{"10-a.conf.ambientd-saved": single, "10-a.conflist": listed})
	})
	t.Run("a third one is chained into our list", func(t *testing.T) {
		n := newNode(t)
		n.put("10-a.conf", single)
		n.install()
		third := strings.Replace(listed, "\n    {\"type\":\"ambient", "\n    {\"type\":\"third\"},\n    {\"type\":\"ambient", 1)
		n.put("10-a.conflist", third)
		_, err := Uninstall(n.cfg)
		must(t, err)
		n.want(map[string]string{"10-a.conf.ambientd-saved": single, "10-a.conflist": strings.Replace(third, ",\n    {\"type\":\"ambient-cni\"}", "", 1)})
	})
	t.Run("another comes first", func(t *testing.T) {
		n := newNode(t)
		n.put("10-a.conf", single)
		n.install()
		n.put("00-b.conflist", chainOf)
		n.install()
		n.want(map[string]string{"10-a.conf": single, "00-b.conflist": chained})
	})
}

// TestOddFiles: what is no file, or has no end, is beside the list that counts; nothing waits for it, and it stays.
func TestOddFiles(t *testing.T) {
	for name, make := range map[string]func(path string) error{
		"pipe":      func(path string) error { return syscall.Mkfifo(path, 0o600) },
		"socket":    func(path string) error { return syscall.Mknod(path, syscall.S_IFSOCK|0o600, 0) },
		"endless":   func(path string) error { return os.Symlink("/dev/zero", path) },
		"dangling":  func(path string) error { return os.Symlink("/nowhere", path) },
		"directory": func(path string) error { return os.Mkdir(path, 0o700) },
		"huge":      func(path string) error { return errors.Join(os.WriteFile(path, nil, 0o600), os.Truncate(path, 1<<40)) },
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t)
			n.put("10-a.conf", single)
			odd := []string{"10-a.conflist", "50-b.conflist", "10-a.conflist.ambientd-saved"}
			for _, name := range odd {
				must(t, make(n.conf(name)))
			}
			if result := n.install(); result.Conflist != n.conf("10-a.conf.conflist") {
				t.Errorf("installed in %s", result.Conflist)
			}
			_, err := Uninstall(n.cfg)
			must(t, err)
			if got := string(readFile(t, n.conf("10-a.conf"))); got != single {
				t.Errorf("afterwards: %s", got)
			}
			for _, name := range odd {
				if _, err := os.Lstat(n.conf(name)); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// TestNotWritten: what could not be written is not told to be.
func TestNotWritten(t *testing.T) {
	n := newNode(t)
	n.put("10-a.conflist", chainOf)
	must(t, os.Remove(n.cfg.BinDir))
	if result, err := Install(t.Context(), n.cfg); err == nil || result.BinaryWritten {
		t.Errorf("result: %+v, %v", result, err)
	}
}

// TestKilled: what an installation left that was killed goes, unless another one may be at work on it.
func TestKilled(t *testing.T) {
	n := newNode(t)
	n.put("10-a.conflist", chainOf)
	n.put(".ambientd-new-old", "torn")
	n.put(".ambientd-new-fresh", "torn")
	left := filepath.Join(n.cfg.BinDir, ".ambientd-new-1")
	must(t, os.WriteFile(left, []byte("torn"), 0o600))
	long := time.Now().Add(-time.Hour)
	must(t, errors.Join(os.Chtimes(left, long, long), os.Chtimes(n.conf(".ambientd-new-old"), long, long)))
	n.install()
	n.want(map[string]string{"10-a.conflist": chained, ".ambientd-new-fresh": "torn"})
	if _, err := os.Lstat(left); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the binary's: %v", err)
	}
}

// TestBinaryInUse is case 5: a plugin that runs is no hindrance, and goes on.
func TestBinaryInUse(t *testing.T) {
	n := newNode(t)
	n.put("10-a.conflist", chainOf)
	cat, err := exec.LookPath("cat")
	must(t, err)
	n.cfg.Plugin = cat
	n.install()
	binary := filepath.Join(n.cfg.BinDir, PluginName)
	blocked := exec.CommandContext(t.Context(), binary)
	stdin, err := blocked.StdinPipe()
	must(t, err)
	var out bytes.Buffer
	blocked.Stdout = &out
	must(t, blocked.Start())
	if err := os.WriteFile(binary, nil, 0o755); !errors.Is(err, syscall.ETXTBSY) {
		t.Fatalf("writing in place: %v; the test shows nothing", err)
	}
	before, err := os.Stat(binary)
	must(t, err)
	n.cfg.Plugin = filepath.Join(t.TempDir(), "newer")
	must(t, os.WriteFile(n.cfg.Plugin, []byte("plugin 2"), 0o600))
	if result := n.install(); !result.BinaryWritten || result.ConflistWritten {
		t.Errorf("result: %+v", result)
	}
	if after, err := os.Stat(binary); err != nil || os.SameFile(before, after) {
		t.Errorf("the same file as before, %v", err)
	}
	_, err = stdin.Write([]byte("goes on"))
	must(t, errors.Join(err, stdin.Close(), blocked.Wait()))
	if out.String() != "goes on" {
		t.Errorf("the one that ran: %q", out.String())
	}
}

// TestWaits for a configuration to appear, and to become whole.
func TestWaits(t *testing.T) {
	n := newNode(t)
	must(t, os.Remove(n.cfg.ConfDir))
	n.cfg.Wait = time.Minute
	told := make(chan string, 2) // to see a second one
	n.cfg.Waiting = func(why error) { told <- why.Error() }
	type outcome struct {
		Result
		err error
	}
	done := make(chan outcome, 1)
	go func() {
		result, err := Install(t.Context(), n.cfg)
		done <- outcome{result, err}
	}()
	if why := <-told; !strings.HasPrefix(why, errNotYet.Error()+": there is no directory "+n.cfg.ConfDir) {
		t.Errorf("of its waiting it told %q", why)
	}
	must(t, os.Mkdir(n.cfg.ConfDir, 0o755))
	n.put("10-a.conflist", chainOf[:30])
	select {
	case o := <-done:
		t.Fatalf("it did not wait: %+v", o)
	case <-time.After(2 * retryPause): // nothing is to happen
	}
	n.put("10-a.conflist", chainOf)
	if o := <-done; o.err != nil || !o.ConflistWritten {
		t.Errorf("%+v", o)
	}
	n.want(map[string]string{"10-a.conflist": chained})
	if len(told) > 0 {
		t.Errorf("of its waiting it told a second time: %q", <-told)
	}
}

// TestInstallRefuses: what cannot be used stays as it is, and the error names it.
func TestInstallRefuses(t *testing.T) {
	for _, c := range []struct {
		name    string
		files   map[string]string
		prepare func(n *node)
		text    string
	}{
		{"no configuration", nil, nil, "the primary CNI plugin has to be installed first"},
		{"torn", map[string]string{"10-a.conflist": chainOf[:40]}, nil, "10-a.conflist: unexpected end"},
		{"torn, with a whole one behind it", map[string]string{"10-a.conflist": "", "20-b.conflist": chainOf}, nil, "10-a.conflist: unexpected end"},
		{"old", map[string]string{"10-a.conf": `{"cniVersion":"0.2.0","name":"n","type":"a"}`}, nil, `cniVersion "0.2.0"`},
		{"nameless", map[string]string{"10-a.conf": `{"cniVersion":"1.0.0","type":"a"}`}, nil, `no key "name"`},
		{"a list that is called a single one", map[string]string{"10-a.json": chainOf}, nil, `no key "type"`},
		{"ours alone", map[string]string{"10-a.conflist": `{"cniVersion":"1.0.0","plugins":[` + plainEntry + `]}`}, nil, "no plugin behind which"},
		{"a link", map[string]string{"elsewhere": chainOf}, func(n *node) { must(n.t, os.Symlink("elsewhere", n.conf("10-a.conflist"))) }, "symbolic link"},
		{"too large", map[string]string{"10-a.conflist": chainOf + strings.Repeat(" ", maxConf)}, nil, "more than 1048576 bytes"},
		{"no binary to copy", map[string]string{"10-a.conflist": chainOf}, func(n *node) { n.cfg.Plugin += "2" }, "new2: no such file"},
		{"an empty one", map[string]string{"10-a.conflist": chainOf}, func(n *node) { must(n.t, os.Truncate(n.cfg.Plugin, 0)) }, "is empty"},
		{"no directory for it", map[string]string{"10-a.conflist": chainOf}, func(n *node) { n.cfg.BinDir += "2" }, "bin2: no such file or directory; it is where the runtime looks for plugins"},
		{"relative", nil, func(n *node) { n.cfg.ConfDir = "net.d" }, "absolute"},
		{"relative binary", nil, func(n *node) { n.cfg.Plugin = "p" }, "absolute"},
		{"negative wait", nil, func(n *node) { n.cfg.Wait = -1 }, "negative"},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := newNode(t)
			dir := n.cfg.ConfDir
			for name, content := range c.files {
				n.put(name, content)
			}
			if c.prepare != nil {
				c.prepare(n)
			}
			result, err := Install(t.Context(), n.cfg)
			if err == nil || !strings.Contains(err.Error(), c.text) {
				t.Errorf("error: %v, want %q", err, c.text)
			}
			if _, err := os.Stat(filepath.Join(n.cfg.BinDir, PluginName)); result.BinaryWritten != (err == nil) {
				t.Errorf("the result says that the binary was written: %t; it is there: %v", result.BinaryWritten, err)
			}
			n.cfg.ConfDir = dir
			for name, content := range c.files {
				if got := readFile(t, n.conf(name)); string(got) != content {
					t.Errorf("%s became %s", name, got)
				}
			}
		})
	}
	t.Run("ended while it waits", func(t *testing.T) {
		n := newNode(t)
		n.cfg.Wait = time.Hour
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := Install(ctx, n.cfg); err == nil || !strings.Contains(err.Error(), "stopped waiting") {
			t.Errorf("error: %v", err)
		}
	})
}

// TestBadDisks: without room, or where nothing can be written, all is as before, and nothing
// unfinished is left.
func TestBadDisks(t *testing.T) {
	netnstest.Require(t)
	for _, c := range []struct {
		name        string
		spoil, mend func(t *testing.T, dir string)
		want        error
	}{
		{"full", func(t *testing.T, dir string) {
			if err := os.WriteFile(filepath.Join(dir, "filler"), make([]byte, 1<<20), 0o600); !errors.Is(err, syscall.ENOSPC) {
				t.Fatalf("filling the disk: %v", err)
			}
		}, func(t *testing.T, dir string) { must(t, os.Remove(filepath.Join(dir, "filler"))) }, syscall.ENOSPC},
		{"read-only",
			func(t *testing.T, dir string) { must(t, unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_RDONLY, "")) },
			func(t *testing.T, dir string) { must(t, unix.Mount("", dir, "", unix.MS_REMOUNT, "")) }, syscall.EROFS},
	} {
		for _, file := range []string{"10-a.conflist", "10-a.conf"} {
			t.Run(c.name+" "+file, func(t *testing.T) {
				n := newNode(t)
				must(t, unix.Mount("tmpfs", n.cfg.ConfDir, "tmpfs", 0, "size=64k"))
				t.Cleanup(func() { must(t, unix.Unmount(n.cfg.ConfDir, unix.MNT_DETACH)) })
				content := map[string]string{"10-a.conflist": chainOf, "10-a.conf": single}[file]
				n.put(file, content)
				c.spoil(t, n.cfg.ConfDir)
				if _, err := Install(t.Context(), n.cfg); !errors.Is(err, c.want) || !strings.Contains(err.Error(), "10-a.conflist") {
					t.Errorf("error: %v", err)
				}
				c.mend(t, n.cfg.ConfDir)
				n.want(map[string]string{file: content})
				n.install()
				c.spoil(t, n.cfg.ConfDir)
				if _, err := Uninstall(n.cfg); errors.Is(c.want, syscall.EROFS) && (!errors.Is(err, c.want) || !strings.Contains(err.Error(), "the binary stays")) {
					t.Errorf("uninstalling: %v", err)
				}
				c.mend(t, n.cfg.ConfDir)
				_, err := Uninstall(n.cfg)
				must(t, err)
				n.want(map[string]string{file: content})
			})
		}
	}
}

// TestUninstallLooksAround: a torn file is in the way only if it may be ours; without configurations
// the binary goes all the same.
func TestUninstallLooksAround(t *testing.T) {
	n := newNode(t)
	n.put("00-torn.conflist", `{"cniVersion`)
	n.put("10-a.conflist", chained)
	n.put("notes.txt", plainEntry)
	changed, err := Uninstall(n.cfg)
	if err != nil || !slices.Equal(changed, []string{n.conf("10-a.conflist")}) {
		t.Errorf("%q, %v", changed, err)
	}
	must(t, os.WriteFile(filepath.Join(n.cfg.BinDir, PluginName), []byte("plugin"), 0o600))
	n.put("00-torn.conflist", chained[:len(chained)-1])
	if _, err := Uninstall(n.cfg); err == nil || !strings.Contains(err.Error(), "00-torn.conflist, which names ambient-cni") {
		t.Errorf("error: %v", err)
	}
	if _, err := os.Stat(filepath.Join(n.cfg.BinDir, PluginName)); err != nil {
		t.Errorf("the binary: %v", err)
	}
	must(t, errors.Join(os.RemoveAll(n.cfg.ConfDir), os.Mkdir(n.cfg.ConfDir, 0o755)))
	if changed, err := Uninstall(n.cfg); err != nil || len(changed) != 1 {
		t.Errorf("without configurations: %q, %v", changed, err)
	}
}

// TestUninstallElsewhere: in a directory that there is not nothing has been looked for, and an entry
// elsewhere may still name the binary.
func TestUninstallElsewhere(t *testing.T) {
	for _, misspelt := range []func(n *node) *string{
		func(n *node) *string { return &n.cfg.ConfDir },
		func(n *node) *string { return &n.cfg.BinDir },
	} {
		n := newNode(t)
		n.put("10-a.conflist", chainOf)
		n.install()
		right := n.cfg
		*misspelt(n) += "2"
		if changed, err := Uninstall(n.cfg); err == nil || !strings.Contains(err.Error(), "there is no directory "+*misspelt(n)+": ") || len(changed) > 0 {
			t.Errorf("%q, %v", changed, err)
		}
		n.cfg = right
		n.want(map[string]string{"10-a.conflist": chained})
		if changed, err := Uninstall(n.cfg); err != nil || len(changed) != 2 {
			t.Errorf("in the right ones: %q, %v", changed, err)
		}
	}
}
