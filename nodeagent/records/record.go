// SPDX-License-Identifier: Apache-2.0

package records

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"unicode/utf8"

	"ambientd/iptables/redirection"
	"ambientd/nodeagent/podnetns"
)

// Version is the version of the record that this package writes, and the only one
// that it reads. A field that an older agent may ignore is added without a new one.
const Version = 1

// maxBytes bounds one record. A pod with 64 attachments takes 12 KiB.
const maxBytes = 64 << 10

// Record is what the agent notes of one pod.
type Record struct {
	Version   int    `json:"version"` // set by Put
	UID       string `json:"uid"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`

	// NetnsPath is where the runtime said the netns is, such as /var/run/netns/cni-1f0c…;
	// empty if it is not known.
	NetnsPath string `json:"netnsPath,omitempty"`
	// Key names the netns; zero for a pod that was skipped before its netns was looked at.
	Key podnetns.Key `json:"-"`
	// IPs are the pod's addresses, as the runtime or the API gave them.
	IPs []netip.Addr `json:"ips,omitempty"`

	// Families are the IP families that are redirected, such as "ipv4,ipv6", and
	// Backend is what redirects them, such as "nftables"; empty for a skipped pod.
	Families string `json:"families,omitempty"`
	Backend  string `json:"backend,omitempty"`

	// Seen is what the backend last knew of the packet rules in the netns; zero if it does
	// not keep such a thing.
	Seen redirection.Sighting `json:"seen,omitzero"`

	// ServiceAccount, Annotations (those that are options) and Probes are what the pod's
	// object said: enough to take the pod up while the object cannot be read.
	ServiceAccount string            `json:"serviceAccount,omitempty"`
	Annotations    map[string]string `json:"annotations,omitempty"`
	Probes         []uint16          `json:"probes,omitempty"`

	// KeepEstablished says that the pod was enrolled while it ran, and that its rules
	// leave the connections alone that it had then.
	KeepEstablished bool `json:"keepEstablished,omitempty"`

	// Attachments are the CNI ADDs of the pod that no DEL has ended; none for a pod
	// that was enrolled while it ran.
	Attachments []Attachment `json:"attachments,omitempty"`

	// Skipped is why the pod is not in the mesh; empty when it is.
	Skipped string `json:"skipped,omitempty"`
}

// Attachment is what the CNI specification identifies an ADD by.
type Attachment struct {
	Network     string `json:"network"`
	ContainerID string `json:"containerID"`
	IfName      string `json:"ifName"`
}

// file is a record as it is on disk: the key's two parts have names of their own there.
type file struct {
	Record

	BootID string `json:"bootID,omitempty"`
	Cookie uint64 `json:"netnsCookie,omitempty"`
}

// encode returns the record's file.
func encode(r Record) ([]byte, error) {
	r.Version = Version
	if err := r.validate(); err != nil {
		return nil, err
	}
	content, err := json.Marshal(file{Record: r, BootID: r.Key.BootID, Cookie: r.Key.Cookie})
	if err != nil {
		return nil, err
	}
	if len(content) >= maxBytes {
		return nil, fmt.Errorf("the record has %d bytes, fewer than %d are allowed", len(content), maxBytes)
	}
	return append(content, '\n'), nil
}

// decode reads a record's file.
func decode(content []byte) (Record, error) {
	var f file
	if err := json.Unmarshal(content, &f); err != nil {
		// Another version may have another form: then that is what is to be said.
		var only struct{ Version int }
		if json.Unmarshal(content, &only) != nil || only.Version == 0 || only.Version == Version {
			return Record{}, err
		}
		f.Version = only.Version
	}
	f.Key = podnetns.Key{BootID: f.BootID, Cookie: f.Cookie}
	return f.Record, f.validate()
}

// validate reports what makes the record unusable.
func (r Record) validate() error {
	switch {
	case r.Version != Version:
		return fmt.Errorf("the record has version %d, this agent knows version %d only", r.Version, Version)
	case r.UID == "":
		return errors.New("the record names no pod UID")
	case !utf8.ValidString(r.UID):
		return errors.New("the pod UID is not UTF-8, which JSON cannot keep") // and reading would give another
	case (r.Key.BootID == "") != (r.Key.Cookie == 0):
		return fmt.Errorf("the netns key is half empty: boot ID %q, cookie %d", r.Key.BootID, r.Key.Cookie)
	case r.Skipped == "" && r.Key == podnetns.Key{}:
		return errors.New("the pod was not skipped, and yet there is no netns key")
	}
	for _, ip := range r.IPs {
		if !ip.IsValid() {
			return errors.New("one of the pod's addresses is empty")
		}
	}
	return nil
}
