// SPDX-License-Identifier: Apache-2.0

//go:build apitest

package onkubernetes

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/google/nftables"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"ambientd/iptables/redirection"
	"ambientd/nodeagent/admin"
	"ambientd/nodeagent/workload"
	"ambientd/nodeagent/zds/zdstest"
)

// awaitConsistent waits until everything is as the pods that are there want it: nothing
// is missing, and nothing is there without its pod.
func (s *soak) awaitConsistent(what string) {
	s.t.Helper()
	began := time.Now()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for last := error(nil); ; {
		err := s.consistent()
		if err == nil {
			s.t.Logf("%s, after %s; what took so long: %v", what, time.Since(began).Round(time.Millisecond), last)
			return
		}
		last = err
		if time.Since(began) > 2*patience {
			s.t.Fatalf("%s: %v\nthe agent's log ends with:\n%s", what, err, s.agent.tail())
		}
		<-tick.C
	}
}

func (s *soak) consistent() error {
	wanted := map[string]*life{} // by UID
	attached := 0
	for _, l := range s.slots {
		if l.pod != nil {
			attached++
		}
		if l.inMesh() {
			wanted[string(l.pod.UID)] = l
		}
	}
	status, err := s.status()
	if err != nil {
		return err
	}
	return errors.Join(s.checkStatus(status, wanted), s.checkProxy(wanted), s.checkFiles(attached), s.checkKernel(wanted), s.checkHost(wanted), s.checkObjects(wanted))
}

// checkStatus compares what the agent says of itself.
func (s *soak) checkStatus(status admin.Status, wanted map[string]*life) error {
	identities := map[string]int{}
	for _, l := range wanted {
		identities[fmt.Sprintf("spiffe://cluster.local/ns/%s/sa/%s", l.pod.Namespace, l.pod.Spec.ServiceAccountName)]++
	}
	for _, pod := range status.Pods {
		switch {
		case wanted[pod.UID] == nil:
			return fmt.Errorf("the status has %s/%s, %s, which is not to be in the mesh", pod.Namespace, pod.Name, pod.State)
		case pod.State != admin.PodEnrolled || pod.Proxy != admin.ProxyAcked:
			return fmt.Errorf("%s/%s is %s, its proxy %s", pod.Namespace, pod.Name, pod.State, pod.Proxy)
		}
	}
	if len(status.Pods) != len(wanted) {
		return fmt.Errorf("the status has %d pods, not %d", len(status.Pods), len(wanted))
	}
	registered := map[string]int{}
	for _, id := range status.Identities {
		registered[id.ID] = id.Pods
	}
	if !maps.Equal(registered, identities) {
		return fmt.Errorf("identities are registered for %v, want %v", registered, identities)
	}
	return nil
}

// checkProxy compares what the node proxy has, netns for netns.
func (s *soak) checkProxy(wanted map[string]*life) error {
	s.mu.Lock()
	peer := s.peer
	s.mu.Unlock()
	if peer == nil {
		return errors.New("no proxy has had its snapshot")
	}
	state := peer.State()
	if state.Err != nil {
		return fmt.Errorf("the proxy's connection has ended: %w", state.Err)
	}
	if len(state.Pods) != len(wanted) {
		return fmt.Errorf("the proxy has %d pods, not %d", len(state.Pods), len(wanted))
	}
	for uid, has := range state.Pods {
		l := wanted[uid]
		if l == nil {
			return fmt.Errorf("the proxy has %s/%s, which is not to be in the mesh", has.Namespace, has.Name)
		}
		cookie, err := zdstest.Cookie(l.netns)
		if err != nil {
			return err
		}
		if cookie != has.Cookie {
			return fmt.Errorf("the proxy has %s/%s in netns %d, it is in %d", has.Namespace, has.Name, has.Cookie, cookie)
		}
	}
	return nil
}

// checkFiles compares what the agent remembers on disk.
func (s *soak) checkFiles(attached int) error {
	for name, want := range map[string]int{"pods": attached, "spool": 0} {
		entries, err := os.ReadDir(filepath.Join(s.cfg.RunDir, "private", name))
		if err != nil {
			return err
		}
		if len(entries) != want {
			return fmt.Errorf("there are %d files in %s, not %d", len(entries), name, want)
		}
	}
	return nil
}

// checkKernel looks for our rules in the netns of each pod.
func (s *soak) checkKernel(wanted map[string]*life) error {
	for _, l := range s.slots {
		if l.pod == nil {
			continue
		}
		conn, err := nftables.New(nftables.WithNetNSFd(int(l.netns.Fd())))
		if err != nil {
			return err
		}
		tables, err := conn.ListTables()
		if err != nil {
			return fmt.Errorf("listing the tables of %s: %w", l.pod.Name, err)
		}
		ours := slices.ContainsFunc(tables, func(t *nftables.Table) bool { return t.Name == redirection.NFTablesTable })
		if _, want := wanted[string(l.pod.UID)]; ours != want || len(tables) > 1 {
			return fmt.Errorf("%s/%s has %d tables, our own among them: %t, want %t", l.pod.Namespace, l.pod.Name, len(tables), ours, want)
		}
	}
	return nil
}

// checkHost compares the addresses for which kubelet's probes pass.
func (s *soak) checkHost(wanted map[string]*life) error {
	addresses := map[netip.Addr]bool{}
	for _, l := range wanted {
		addresses[l.ip] = true
	}
	conn, err := nftables.New()
	if err != nil {
		return err
	}
	set, err := conn.GetSetByName(&nftables.Table{Name: redirection.HostTable, Family: nftables.TableFamilyINet}, redirection.ProbeSetIPv4)
	if err != nil {
		return fmt.Errorf("looking for the set of addresses: %w", err)
	}
	elements, err := conn.GetSetElements(set)
	if err != nil {
		return fmt.Errorf("reading the set of addresses: %w", err)
	}
	has := map[netip.Addr]bool{}
	for _, element := range elements {
		if addr, ok := netip.AddrFromSlice(element.Key); ok {
			has[addr] = true
		}
	}
	if !maps.Equal(has, addresses) {
		return fmt.Errorf("the host's set has %d addresses, want %d", len(has), len(addresses))
	}
	return nil
}

// checkObjects compares the annotations of all pods.
func (s *soak) checkObjects(wanted map[string]*life) error {
	pods, err := s.admin.CoreV1().Pods(metav1.NamespaceAll).List(s.t.Context(), metav1.ListOptions{FieldSelector: "spec.nodeName=" + s.node})
	if err != nil {
		return err
	}
	for _, pod := range pods.Items {
		want := ""
		if wanted[string(pod.UID)] != nil {
			want = "enabled"
		}
		if got := pod.Annotations[workload.AnnotationRedirection]; got != want {
			return fmt.Errorf("the annotation of %s/%s is %q, want %q", pod.Namespace, pod.Name, got, want)
		}
	}
	return nil
}
