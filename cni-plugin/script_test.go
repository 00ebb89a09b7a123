// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"ambientd/cni-plugin/podevent"
	"ambientd/tools/netnstest"
)

// TestScripts runs the plugin as a runtime does. A script finds in its environment what a runtime
// sets for a pod shop/cart-0, $SOCK, where its agent listens, and $BOOT, the boot's ID. Its commands:
//
//	agent WHAT [ARG]   an agent that does WHAT with each request, instead of the one before
//	asked              print the requests that came since, one JSON object a line
//	spooled            print the events that are in the spool of $WORK/run, and remove them
//	expand FILE…       replace ${NAME} in files by the environment
func TestScripts(t *testing.T) {
	pod := netnstest.New(t)
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		t.Fatal(err)
	}
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata/script",
		RequireExplicitExec: true,
		Setup: func(env *testscript.Env) error {
			for key, value := range map[string]string{
				"SOCK":            filepath.Join(env.WorkDir, "cni.sock"),
				"CNI_CONTAINERID": "c1",
				"CNI_IFNAME":      "eth0",
				"CNI_PATH":        "/opt/cni/bin",
				"CNI_NETNS":       nsPath(pod),
				"CNI_ARGS":        "K8S_POD_UID=u1;IgnoreUnknown=1;K8S_POD_NAME=cart-0;K8S_POD_INFRA_CONTAINER_ID=c1;K8S_POD_NAMESPACE=shop",
				"GORACE":          os.Getenv("GORACE"),
				"BOOT":            strings.TrimSpace(string(boot)),
			} {
				env.Setenv(key, value)
			}
			env.Values[agentKey{}] = &scriptAgent{pod: fileID(pod.File())}
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"agent": cmdAgent, "asked": cmdAsked, "spooled": cmdSpooled, "expand": cmdExpand,
		},
	})
}

type agentKey struct{}

// scriptAgent is the agent that a script has at the moment, if any.
type scriptAgent struct {
	*fakeAgent
	pod string // what identifies the pod's network namespace
}

func (s *scriptAgent) stop() error {
	if s.fakeAgent == nil {
		return nil
	}
	err := s.close()
	s.fakeAgent = nil
	return err
}

func cmdAgent(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) == 0 {
		ts.Fatalf("usage: agent WHAT [ARG]")
	}
	current := ts.Value(agentKey{}).(*scriptAgent)
	ts.Check(current.stop())
	if args[0] == "stops" {
		return
	}
	behave, err := parseBehaviour(args[0], strings.Join(args[1:], " "))
	ts.Check(err)
	current.fakeAgent, err = newAgent(ts.Getenv("SOCK"), behave)
	ts.Check(err)
	ts.Defer(func() { ts.Check(current.stop()) })
}

// parseBehaviour knows what a script's agent may do.
func parseBehaviour(what, arg string) (behaviour, error) {
	switch what {
	case "enrols":
		return answers(podevent.Reply{Result: podevent.ResultEnrolled}), nil
	case "skips":
		return answers(podevent.Reply{Result: podevent.ResultSkipped, Reason: arg}), nil
	case "agrees":
		return answers(podevent.Reply{Result: podevent.ResultOK}), nil
	case "refuses":
		code, msg, _ := strings.Cut(arg, " ")
		n, err := strconv.ParseUint(code, 10, 32)
		return answers(podevent.Reply{Error: &podevent.Error{Code: uint(n), Msg: msg, Details: "do something"}}), err
	case "sends":
		return sendsRaw([]byte(arg)), nil
	case "hangs-up":
		return hangsUp, nil
	case "hangs-up-in-reply":
		return hangsUpInReply, nil
	case "announces-too-much":
		return announcesTooMuch, nil
	case "stays-silent":
		return staysSilent, nil
	}
	return nil, fmt.Errorf("an agent cannot do %q", what)
}

func cmdAsked(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 0 {
		ts.Fatalf("usage: asked")
	}
	current := ts.Value(agentKey{}).(*scriptAgent)
	if current.fakeAgent == nil {
		ts.Fatalf("there is no agent")
	}
	out := ts.Stdout() // asked for also if nothing is written: it is empty then
	for _, got := range current.take() {
		switch got.NetnsFile {
		case "":
			got.NetnsFile = "none"
		case current.pod:
			got.NetnsFile = "the pod's"
		}
		line, err := json.Marshal(got)
		ts.Check(err)
		_, err = fmt.Fprintf(out, "%s\n", line)
		ts.Check(err)
	}
}

func cmdSpooled(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 0 {
		ts.Fatalf("usage: spooled")
	}
	out := ts.Stdout()
	files, err := filepath.Glob(ts.MkAbs("run/private/spool/*"))
	ts.Check(err)
	for _, file := range files {
		req, err := podevent.DecodeSpooled([]byte(ts.ReadFile(file)))
		ts.Check(err)
		line, err := json.Marshal(req)
		ts.Check(err)
		_, err = fmt.Fprintf(out, "%s\n", line)
		ts.Check(err)
		ts.Check(os.Remove(file))
	}
}

func cmdExpand(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) == 0 {
		ts.Fatalf("usage: expand FILE…")
	}
	for _, name := range args {
		text := os.Expand(ts.ReadFile(name), ts.Getenv)
		ts.Check(os.WriteFile(ts.MkAbs(name), []byte(text), 0o600))
	}
}
