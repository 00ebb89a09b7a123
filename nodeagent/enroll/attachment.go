// SPDX-License-Identifier: Apache-2.0

package enroll

import (
	"ambientd/cni-plugin/podevent"
	"ambientd/nodeagent/podnetns"
)

// attachment is what one CNI ADD left behind, so that its DEL, and no other
// pod's or older sandbox's, ends what it began.
type attachment struct {
	network   string       // CNI network name; GC looks at one network at a time
	uid       string       // of the pod
	namespace string       // of the pod
	name      string       // of the pod
	netns     podnetns.Key // zero for a skipped pod whose netns could not be used
	skipped   string       // why the pod is not in the mesh; empty when it is
}

// attachments finds a record by attachment, and the attachments of a pod by UID.
type attachments struct {
	records map[podevent.Attachment]attachment
	ofPod   map[string]map[podevent.Attachment]struct{}
}

func newAttachments() attachments {
	return attachments{
		records: map[podevent.Attachment]attachment{},
		ofPod:   map[string]map[podevent.Attachment]struct{}{},
	}
}

func (as attachments) record(of podevent.Attachment, a attachment) {
	as.forget(of)
	as.records[of] = a
	if as.ofPod[a.uid] == nil {
		as.ofPod[a.uid] = map[podevent.Attachment]struct{}{}
	}
	as.ofPod[a.uid][of] = struct{}{}
}

func (as attachments) forget(of podevent.Attachment) {
	uid := as.records[of].uid
	delete(as.records, of)
	delete(as.ofPod[uid], of)
	if len(as.ofPod[uid]) == 0 {
		delete(as.ofPod, uid)
	}
}

// forgetIn forgets the pod's attachments in the netns. What is recorded of older
// sandboxes stays, for their own DELs.
func (as attachments) forgetIn(uid string, netns podnetns.Key) {
	for of := range as.ofPod[uid] {
		if as.records[of].netns == netns {
			as.forget(of)
		}
	}
}

// setSkipped notes for the pod's attachments in the netns why the pod is outside
// the mesh, or with an empty reason that it is in there.
func (as attachments) setSkipped(uid string, netns podnetns.Key, reason string) {
	for of := range as.ofPod[uid] {
		if a := as.records[of]; a.netns == netns {
			a.skipped = reason
			as.records[of] = a
		}
	}
}

// holds tells whether the pod still has an attachment in the netns: a pod with
// two interfaces is attached twice, and only the last DEL withdraws it.
func (as attachments) holds(uid string, netns podnetns.Key) bool {
	for of := range as.ofPod[uid] {
		if as.records[of].netns == netns {
			return true
		}
	}
	return false
}
