// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"

	"ambientd/cni-plugin/podevent"
)

const (
	// delTimeout bounds DEL: the pod is going anyway, and nobody should wait for an agent that is away.
	delTimeout = 900 * time.Millisecond
	// outsideTimeout bounds ADD and CHECK of pods that are outside the mesh for sure: the agent is told,
	// so that it records the attachment, but its answer does not matter.
	outsideTimeout = 2 * time.Second
	// statusTimeout bounds a strict STATUS, which runtimes ask for every few seconds.
	statusTimeout = 2 * time.Second
)

// add enrols a pod, or fails: a pod of the mesh must not start outside it.
func add(args *skel.CmdArgs) error {
	conf, err := parseConfig(args.StdinData)
	if err != nil {
		return badConfig(err)
	}
	pod, err := needPod(args.Args)
	if err != nil {
		// The specification has 4 for the environment: not the configuration is wrong, but the caller.
		return types.NewError(types.ErrInvalidEnvironmentVariables, fmt.Sprintf("CNI_ARGS: %v", err),
			"ambient-cni serves pods of Kubernetes; their runtimes pass K8S_POD_NAMESPACE and K8S_POD_NAME")
	}
	ips, err := parseAddresses(conf.prevResult)
	if err != nil {
		return types.NewError(podevent.CodeInvalidConfig, fmt.Sprintf("pod %s: prevResult: %v", pod, err),
			"ambient-cni is chained: the plugin before it in the conflist has to return a result")
	}
	req := podevent.Request{
		Command: podevent.CommandAdd, Network: conf.name,
		ContainerID: args.ContainerID, IfName: args.IfName, NetnsPath: args.Netns, Pod: pod, IPs: ips,
	}
	if err := askAboutPod(conf, req, args.Netns, func(error) bool { return true }); err != nil {
		return err
	}
	return printResult(conf)
}

// askAboutPod opens the network namespace and asks the agent. Of a pod that is outside the mesh for
// sure, or by what the agent said of its namespace when it last ran, errors that ignorable accepts are
// none.
func askAboutPod(conf config, req podevent.Request, netnsPath string, ignorable func(error) bool) error {
	netns, err := openNetns(netnsPath)
	if err != nil {
		return badNetns(req, err)
	}
	defer netns.Close()
	timeout := conf.timeout
	why, outside := conf.never.Match(req.Pod)
	if outside {
		timeout = min(timeout, outsideTimeout)
	}
	reply, err := call(conf, timeout, req, netns)
	var policyErr error
	if !outside && unanswered(err) {
		why, policyErr = conf.passesWithoutAgent(req.Pod)
		outside = why != ""
	}
	logger(conf).Debug("asked the agent", "pod", req.Pod.String(), "uid", req.Pod.UID, "netns", netnsPath,
		"outside", why, "result", reply.Result, "reason", reply.Reason, "err", joined(err, policyErr))
	if outside && err != nil && ignorable(err) {
		return nil
	}
	return err
}

// printResult passes the result of the plugin before on, byte for byte as it came.
//
// The specification wants a result in the version of the configuration, which is what libcni puts
// into prevResult. Where another plugin of the chain answered in a different one, libcni goes by
// the cniVersion inside the result. Decoding and printing it anew would lose what the library's
// types do not know: fields of later versions, and those that plugins add for each other.
func printResult(conf config) error {
	if _, err := os.Stdout.Write(conf.prevResult); err != nil {
		return types.NewError(types.ErrIOFailure, fmt.Sprintf("printing the result: %v", err), "")
	}
	return nil
}

// del tells the agent and succeeds whatever comes of it: the pod is gone for the runtime, which would
// otherwise repeat DEL for ever. To an agent that does not take the event it is left in the spool; if
// that fails too, its start finds out by itself. Of a configuration with bad values DEL uses the rest.
func del(args *skel.CmdArgs) error {
	conf, confErr := parseConfig(args.StdinData)
	pod, podErr := parsePod(args.Args)
	var netns *os.File
	var netnsErr error
	if args.Netns != "" {
		// Without the namespace, which is gone as a rule if it cannot be opened, the attachment says enough.
		if netns, netnsErr = openNetns(args.Netns); netnsErr == nil {
			defer netns.Close()
		}
	}
	req := podevent.Request{
		Command: podevent.CommandDel, Network: conf.name,
		ContainerID: args.ContainerID, IfName: args.IfName, Pod: pod,
	}
	reply, err := call(conf, min(conf.timeout, delTimeout), req, netns)
	var spoolErr error
	if err != nil {
		spoolErr = podevent.Spool(conf.runDir+podevent.SpoolInRunDir, req)
	}
	logger(conf).Debug("told the agent", "pod", pod.String(), "uid", pod.UID, "netns", args.Netns,
		"result", reply.Result, "reason", reply.Reason, "err", joined(confErr, podErr, netnsErr, err, spoolErr))
	return nil
}

// check has the agent compare kernel, proxy and identity with what should be.
func check(args *skel.CmdArgs) error {
	conf, err := parseConfig(args.StdinData)
	if err != nil {
		return badConfig(err)
	}
	pod, err := parsePod(args.Args)
	if err != nil {
		return types.NewError(types.ErrInvalidEnvironmentVariables, fmt.Sprintf("CNI_ARGS: %v", err), "")
	}
	req := podevent.Request{
		Command: podevent.CommandCheck, Network: conf.name,
		ContainerID: args.ContainerID, IfName: args.IfName, Pod: pod,
	}
	// Without an agent there is nothing to compare, but nothing of ours in that pod either. What an
	// agent that answers has found is an error for any pod.
	return askAboutPod(conf, req, args.Netns, func(err error) bool { return errors.Is(err, podevent.ErrUnavailable) })
}

// gc has the agent withdraw the attachments that the runtime does not know any more.
func gc(args *skel.CmdArgs) error {
	conf, err := parseConfig(args.StdinData)
	if err != nil {
		return badConfig(err)
	}
	valid, err := parseAttachments(conf.validAttachments)
	if err != nil {
		return types.NewError(podevent.CodeInvalidConfig, fmt.Sprintf("cni.dev/valid-attachments: %v", err), "nothing was withdrawn")
	}
	req := podevent.Request{Command: podevent.CommandGC, Network: conf.name, ValidAttachments: valid}
	_, err = call(conf, conf.timeout, req, nil)
	logger(conf).Debug("asked the agent", "valid", len(valid), "err", err)
	return err
}

// status succeeds whenever ADD can pass pods outside the mesh, which takes nothing but a valid
// configuration. An error makes the runtime report its network as broken: the node turns NotReady
// and its pods are evicted, those outside the mesh too. strictStatus asks for just that.
func status(args *skel.CmdArgs) error {
	conf, err := parseConfig(args.StdinData)
	if err != nil {
		return badConfig(err)
	}
	if !conf.strictStatus {
		return nil
	}
	req := podevent.Request{Command: podevent.CommandStatus, Network: conf.name}
	_, err = call(conf, min(conf.timeout, statusTimeout), req, nil)
	logger(conf).Debug("asked the agent", "err", err)
	return strictly(err)
}

// call asks the agent. The error, if any, is one for the runtime; that the agent does not answer can
// be told from it by [podevent.ErrUnavailable].
func call(conf config, timeout time.Duration, req podevent.Request, netns *os.File) (podevent.Reply, error) {
	ctx, cancel := context.WithTimeoutCause(context.Background(), timeout, fmt.Errorf("no reply within %s", timeout))
	defer cancel()
	reply, err := podevent.Call(ctx, conf.socket, req, netns)
	if err == nil && reply.Error != nil {
		// A runtime takes the code 0 for success.
		code := cmp.Or(reply.Error.Code, podevent.CodeInternal)
		return reply, types.NewError(code, reply.Error.Msg, reply.Error.Details)
	}
	if err == nil && req.Command == podevent.CommandAdd &&
		reply.Result != podevent.ResultEnrolled && reply.Result != podevent.ResultSkipped {
		err = fmt.Errorf("%w: %.32q is no answer to ADD", podevent.ErrMalformed, reply.Result)
	}
	if err == nil {
		return reply, nil
	}
	return podevent.Reply{}, noAnswer(conf, req, err)
}
