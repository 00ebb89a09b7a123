// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"syscall"

	"ambientd/cni-plugin/podevent"
)

// parsePod finds the pod in CNI_ARGS ("KEY=value;KEY=value", in any order). Other keys are ignored
// whether IgnoreUnknown is set or not: what runtimes add is no business of ours. Two values for one
// key are an error, since either could be meant.
func parsePod(args string) (podevent.Pod, error) {
	var pod podevent.Pod
	var errs []error
	for pair := range strings.SplitSeq(args, ";") {
		key, value, _ := strings.Cut(pair, "=")
		var target *string
		switch key {
		case "K8S_POD_NAMESPACE":
			target = &pod.Namespace
		case "K8S_POD_NAME":
			target = &pod.Name
		case "K8S_POD_UID":
			target = &pod.UID
		default:
			continue
		}
		if *target != "" && *target != value {
			errs = append(errs, fmt.Errorf("%s is given twice, as %.64q and %.64q", key, *target, value))
		}
		*target = value
	}
	return pod, joined(errs...)
}

// needPod is for ADD, where the pod decides.
func needPod(args string) (podevent.Pod, error) {
	pod, err := parsePod(args)
	if err != nil {
		return pod, err
	}
	var missing []string
	if pod.Namespace == "" {
		missing = append(missing, "K8S_POD_NAMESPACE")
	}
	if pod.Name == "" {
		missing = append(missing, "K8S_POD_NAME")
	}
	if len(missing) > 0 {
		return pod, fmt.Errorf("%s missing", strings.Join(missing, " and "))
	}
	return pod, nil
}

// parseAddresses finds the pod's addresses in the result of the plugin before. An error means that
// it cannot be used as a result: ours is the same one.
//
// An address without "interface" is the pod's; one with it only if that interface is in a sandbox,
// because results may list the host's side too. Where no interface names a sandbox (plugins before
// 0.4.0 had no need to), every address is the pod's.
func parseAddresses(prevResult json.RawMessage) ([]netip.Addr, error) {
	if len(prevResult) == 0 || string(prevResult) == "null" {
		return nil, errors.New("there is none")
	}
	var result struct {
		CNIVersion string `json:"cniVersion"`
		Interfaces []struct {
			Sandbox string `json:"sandbox"`
		} `json:"interfaces"`
		IPs []struct {
			Address   string `json:"address"`
			Interface *int   `json:"interface"`
		} `json:"ips"`
	}
	if err := json.Unmarshal(prevResult, &result); err != nil {
		return nil, err
	}
	if result.CNIVersion == "0.1.0" || result.CNIVersion == "0.2.0" {
		return nil, fmt.Errorf("it has cniVersion %s, in which results cannot be chained", result.CNIVersion)
	}
	anySandbox := false
	for _, i := range result.Interfaces {
		anySandbox = anySandbox || i.Sandbox != ""
	}
	var addrs []netip.Addr
	for n, ip := range result.IPs {
		prefix, err := netip.ParsePrefix(ip.Address)
		if err != nil {
			return nil, fmt.Errorf("ips[%d].address: %w", n, err)
		}
		if i := ip.Interface; i != nil {
			if *i < 0 || *i >= len(result.Interfaces) {
				return nil, fmt.Errorf("ips[%d].interface is %d, there are %d interfaces", n, *i, len(result.Interfaces))
			}
			if anySandbox && result.Interfaces[*i].Sandbox == "" {
				continue
			}
		}
		if addr := prefix.Addr().Unmap(); !slices.Contains(addrs, addr) {
			addrs = append(addrs, addr)
		}
	}
	return addrs, nil
}

// parseAttachments decodes GC's list of what the runtime still knows. null and [] mean nothing; a
// list that is not there means that the runtime does not say, and a malformed one must not count as
// a shorter one: everything that it does not name gets withdrawn.
func parseAttachments(raw json.RawMessage) ([]podevent.Attachment, error) {
	if raw == nil {
		return nil, errors.New("there is none; a runtime that knows no attachment passes [] or null")
	}
	var given []struct {
		ContainerID string `json:"containerID"`
		IfName      string `json:"ifname"`
	}
	if err := json.Unmarshal(raw, &given); err != nil {
		return nil, err
	}
	valid := make([]podevent.Attachment, 0, len(given))
	for i, a := range given {
		if a.ContainerID == "" || a.IfName == "" {
			return nil, fmt.Errorf("item %d has no containerID or no ifname", i)
		}
		valid = append(valid, podevent.Attachment{ContainerID: a.ContainerID, IfName: a.IfName})
	}
	return valid, nil
}

const (
	// nsfsMagic is the f_type of the file system that namespaces are files of (NSFS_MAGIC in linux/magic.h).
	nsfsMagic = 0x6e736673
	// nsGetNSType asks such a file for its CLONE_NEW… constant (NS_GET_NSTYPE = _IO(0xb7, 3) in linux/nsfs.h).
	nsGetNSType = 0xb703
)

// openNetns opens the network namespace at path, unless it is something else or the plugin's own,
// which is the host's: programming that would cut the node off.
func openNetns(path string) (*os.File, error) {
	// O_NONBLOCK, lest a FIFO at the path blocks the open for ever; a namespace does not mind.
	file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_NOCTTY, 0)
	if err != nil {
		return nil, err
	}
	if err := checkNetns(file); err != nil {
		return nil, joined(fmt.Errorf("%q %w", path, err), file.Close())
	}
	return file, nil
}

func checkNetns(file *os.File) error {
	raw, err := file.SyscallConn()
	if err != nil {
		return fmt.Errorf("cannot be examined: %w", err)
	}
	var typeErr error
	if err := raw.Control(func(fd uintptr) { typeErr = checkNSType(fd) }); err != nil {
		return fmt.Errorf("cannot be examined: %w", err)
	}
	if typeErr != nil {
		return typeErr
	}
	theirs, err := file.Stat()
	if err != nil {
		return fmt.Errorf("cannot be examined: %w", err)
	}
	// Device and inode tell namespaces apart as long as both exist, and both are held open here or
	// by being in it. All threads of the plugin are in the same one.
	own, err := os.Stat("/proc/self/ns/net")
	if err != nil {
		return fmt.Errorf("cannot be told from the plugin's own: %w", err)
	}
	if os.SameFile(own, theirs) {
		return errors.New("is the plugin's own network namespace, the host's")
	}
	return nil
}

func checkNSType(fd uintptr) error {
	// Other files may take the ioctl's number for something else: they are not asked.
	var fs syscall.Statfs_t
	if err := syscall.Fstatfs(int(fd), &fs); err != nil {
		return fmt.Errorf("cannot be examined: %w", err)
	}
	if fs.Type != nsfsMagic {
		return errors.New("is no namespace")
	}
	nsType, _, errno := syscall.Syscall(syscall.SYS_IOCTL, fd, nsGetNSType, 0)
	if errno != 0 {
		return fmt.Errorf("does not tell its type: %w", errno)
	}
	if nsType != syscall.CLONE_NEWNET {
		return fmt.Errorf("is a namespace of another type (%#x)", nsType)
	}
	return nil
}
