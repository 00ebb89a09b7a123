// SPDX-License-Identifier: Apache-2.0

package xtables

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"unsafe"

	"golang.org/x/sys/unix"

	"ambientd/iptables/redirection"
)

// getInfo is IPT_SO_GET_INFO and IP6T_SO_GET_INFO alike
// (linux/netfilter_ipv4/ip_tables.h).
const getInfo = 64

// tableInfo is struct ipt_getinfo, and struct ip6t_getinfo alike: the name of a
// table, and what the kernel says of it.
type tableInfo struct {
	name       [32]byte
	validHooks uint32
	hookEntry  [5]uint32
	underflow  [5]uint32
	numEntries uint32
	size       uint32
}

// tablesAreEmpty reports whether there is neither a rule nor a chain in tables that
// x_tables is known to have; asked about others, it would make them. It takes no
// child process.
func tablesAreEmpty(run redirection.Runner, family redirection.Families, tables []string) (bool, error) {
	empty := true
	err := run(func() (err error) {
		domain, level := unix.AF_INET, unix.SOL_IP
		if family == redirection.IPv6 {
			domain, level = unix.AF_INET6, unix.SOL_IPV6
		}
		fd, err := unix.Socket(domain, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, unix.Close(fd)) }()
		for _, table := range tables {
			info, err := readInfo(fd, level, table)
			if err != nil {
				return fmt.Errorf("table %s: %w", table, err)
			}
			// Each built-in chain has its policy, and an entry ends them all.
			empty = empty && int(info.numEntries) == bits.OnesCount32(info.validHooks)+1
		}
		return nil
	})
	if err != nil {
		return false, fmt.Errorf("asking x_tables for %s: %w", family, err)
	}
	return empty, nil
}

func readInfo(fd, level int, table string) (tableInfo, error) {
	var info tableInfo
	copy(info.name[:len(info.name)-1], table)
	length := uint32(binary.Size(info))
	//nolint:gosec // package unix has no getsockopt whose argument goes in, too
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), getInfo,
		uintptr(unsafe.Pointer(&info)), uintptr(unsafe.Pointer(&length)), 0)
	if errno != 0 {
		return tableInfo{}, errno
	}
	return info, nil
}
