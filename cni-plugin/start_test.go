// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"ambientd/cni-plugin/podevent"
	"ambientd/tools/netnstest"
)

// maxBinary is what the plugin's binary may have, in bytes: it is read on every pod start.
const maxBinary = 5 << 20

// buildStatic builds a main package as `make build` does.
func buildStatic(tb testing.TB, pkg string) string {
	tb.Helper()
	out := filepath.Join(tb.TempDir(), filepath.Base(pkg))
	cmd := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-ldflags", "-s -w", "-o", out, pkg)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if output, err := cmd.CombinedOutput(); err != nil {
		tb.Fatalf("building %s: %v\n%s", pkg, err, output)
	}
	return out
}

// BenchmarkStart runs ADD with an agent that answers at once, in turn with a plugin of the skeleton
// that does nothing, and reports the medians and their ratio, which may be at most 1.4. Turns are
// taken because the machine's speed changes more between runs than what is measured.
func BenchmarkStart(b *testing.B) {
	plugins := []string{buildStatic(b, "ambientd/cni-plugin"), buildStatic(b, "ambientd/tools/bench/noop-plugin")}
	info, err := os.Stat(plugins[0])
	if err != nil {
		b.Fatal(err)
	}
	if info.Size() > maxBinary {
		b.Errorf("the binary has %d bytes, at most %d are allowed", info.Size(), maxBinary)
	}
	socket := filepath.Join(b.TempDir(), "cni.sock")
	startAgent(b, socket, answers(podevent.Reply{Result: podevent.ResultEnrolled}))
	stdin := withKeys(b, samples(b)["ADD-containerd-2.4"], map[string]any{"socket": socket})
	env := append(os.Environ(), "CNI_COMMAND=ADD", "CNI_CONTAINERID=c1", "CNI_IFNAME=eth0", "CNI_PATH=/",
		"CNI_NETNS="+nsPath(netnstest.New(b)), "CNI_ARGS=K8S_POD_NAMESPACE=ns;K8S_POD_NAME=p")

	wall, cpu := [2][]time.Duration{}, [2][]time.Duration{}
	for range b.N {
		for i, plugin := range plugins {
			cmd := exec.Command(plugin)
			cmd.Env, cmd.Stdin = env, bytes.NewReader(stdin)
			start := time.Now()
			if err := cmd.Run(); err != nil {
				b.Fatalf("%s: %v", plugin, err)
			}
			wall[i] = append(wall[i], time.Since(start))
			cpu[i] = append(cpu[i], cmd.ProcessState.UserTime()+cmd.ProcessState.SystemTime())
		}
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(median(wall[0]).Seconds()*1e3, "ms/ADD")
	b.ReportMetric(median(wall[1]).Seconds()*1e3, "ms/nothing")
	b.ReportMetric(ratio(wall), "wall-ratio")
	b.ReportMetric(ratio(cpu), "cpu-ratio")
	b.ReportMetric(float64(info.Size())/1e6, "MB")
}

func median(durations []time.Duration) time.Duration {
	slices.Sort(durations)
	return durations[len(durations)/2]
}

func ratio(d [2][]time.Duration) float64 {
	return median(d[0]).Seconds() / median(d[1]).Seconds()
}
