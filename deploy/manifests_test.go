// SPDX-License-Identifier: Apache-2.0

// Package deploy has no code of its own: its tests hold the manifests against what they
// promise.
package deploy

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"ambientd/cni-plugin/podevent"
)

// documents returns the YAML documents of the files that match.
func documents(t *testing.T, pattern string) []string {
	t.Helper()
	files, err := filepath.Glob(pattern)
	if err != nil || len(files) == 0 {
		t.Fatalf("no manifest at %s (%v)", pattern, err)
	}
	var all []string
	for _, file := range files {
		content, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, strings.Split(string(content), "\n---\n")...)
	}
	return all
}

// read returns the one object of the kind in the files, decoded strictly: a field that
// the API does not know would be dropped in silence.
func read[T any](t *testing.T, pattern, kind string) T {
	t.Helper()
	var found []T
	for _, document := range documents(t, pattern) {
		var meta metav1.TypeMeta
		if err := yaml.Unmarshal([]byte(document), &meta); err != nil {
			t.Fatal(err)
		}
		if meta.Kind != kind {
			continue
		}
		var object T
		if err := yaml.UnmarshalStrict([]byte(document), &object); err != nil {
			t.Errorf("%s: %v", kind, err)
		}
		found = append(found, object)
	}
	if len(found) != 1 {
		t.Fatalf("%d objects of kind %s in %s", len(found), kind, pattern)
	}
	return found[0]
}

const manifests = "manifests/*.yaml"

// What the agent may do. Whoever adds a line gives the reason in the manifest and in
// README.md, and to whoever reviews it.
func TestRoleIsExactly(t *testing.T) {
	var got []string
	for _, rule := range read[rbacv1.ClusterRole](t, manifests, "ClusterRole").Rules {
		if len(rule.ResourceNames)+len(rule.NonResourceURLs) > 0 {
			t.Errorf("rule %+v", rule)
		}
		for _, group := range rule.APIGroups {
			for _, resource := range rule.Resources {
				got = append(got, strings.TrimPrefix(group+"/"+resource, "/")+": "+strings.Join(rule.Verbs, " "))
			}
		}
	}
	want := []string{
		"pods: get list watch",
		"pods/status: patch",
		"namespaces: get list watch",
		"events: create patch",
	}
	if !slices.Equal(got, want) {
		t.Errorf("the role allows %q, want %q", got, want)
	}
}

// The parts have to name each other as they do, or nothing is granted and nobody guarded.
func TestNamesFit(t *testing.T) {
	account := read[corev1.ServiceAccount](t, manifests, "ServiceAccount")
	namespace := read[corev1.Namespace](t, manifests, "Namespace")
	daemonSet := read[appsv1.DaemonSet](t, manifests, "DaemonSet")
	binding := read[rbacv1.ClusterRoleBinding](t, manifests, "ClusterRoleBinding")
	policy := read[admissionv1.ValidatingAdmissionPolicy](t, manifests, "ValidatingAdmissionPolicy")
	guard := read[admissionv1.ValidatingAdmissionPolicyBinding](t, manifests, "ValidatingAdmissionPolicyBinding")
	proxy := read[appsv1.DaemonSet](t, "dev/*.yaml", "DaemonSet")
	for what, pair := range map[string][2]string{
		"namespace of the plugin's default":  {namespace.Name, podevent.DefaultAgentNamespace},
		"namespace of the account":           {account.Namespace, namespace.Name},
		"namespace of the DaemonSet":         {daemonSet.Namespace, namespace.Name},
		"namespace of devproxy":              {proxy.Namespace, namespace.Name},
		"account of the DaemonSet":           {daemonSet.Spec.Template.Spec.ServiceAccountName, account.Name},
		"role that is bound":                 {binding.RoleRef.Name, read[rbacv1.ClusterRole](t, manifests, "ClusterRole").Name},
		"subject of the binding":             {fmt.Sprint(binding.Subjects), fmt.Sprint([]rbacv1.Subject{{Kind: "ServiceAccount", Name: account.Name, Namespace: account.Namespace}})},
		"policy that is bound":               {guard.Spec.PolicyName, policy.Name},
		"account that the policy is about":   {policy.Spec.MatchConditions[0].Expression, "request.userInfo.username == 'system:serviceaccount:" + account.Namespace + ":" + account.Name + "'"},
		"what the policy's binding does":     {fmt.Sprint(guard.Spec.ValidationActions), "[Deny]"},
		"what the policy does when it fails": {string(*policy.Spec.FailurePolicy), "Fail"},
	} {
		if pair[0] != pair[1] {
			t.Errorf("%s: %q, want %q", what, pair[0], pair[1])
		}
	}
}

// The agent's place on the host, as the design has it.
func TestPlaceOnTheHost(t *testing.T) {
	pod := read[appsv1.DaemonSet](t, manifests, "DaemonSet").Spec.Template.Spec
	if !pod.HostNetwork || pod.HostPID || pod.HostIPC || pod.DNSPolicy != corev1.DNSClusterFirstWithHostNet ||
		pod.PriorityClassName != "system-node-critical" || !slices.Equal(pod.Tolerations, []corev1.Toleration{{Operator: corev1.TolerationOpExists}}) {
		t.Errorf("pod %+v", pod)
	}
	agent := pod.Containers[0]
	var mounts []string
	for _, m := range agent.VolumeMounts {
		text := m.MountPath
		if m.ReadOnly {
			text += " read-only"
		}
		if m.MountPropagation != nil {
			text += " " + string(*m.MountPropagation)
		}
		mounts = append(mounts, text)
	}
	if want := []string{
		"/run/ambientd", "/var/run/ztunnel",
		"/var/run/netns read-only HostToContainer", "/host/proc read-only",
	}; !slices.Equal(mounts, want) {
		t.Errorf("mounts %q, want %q", mounts, want)
	}
	for _, v := range pod.Volumes {
		for _, m := range agent.VolumeMounts {
			// Records and the runtime name these by the host's path.
			if v.Name == m.Name && v.HostPath.Path != strings.TrimPrefix(m.MountPath, "/host") {
				t.Errorf("%s of the host is mounted at %s", v.HostPath.Path, m.MountPath)
			}
		}
	}
}

// No container has more than it was given by name.
func TestContainersAreConfined(t *testing.T) {
	agent := read[appsv1.DaemonSet](t, manifests, "DaemonSet").Spec.Template.Spec
	proxy := read[appsv1.DaemonSet](t, "dev/*.yaml", "DaemonSet").Spec.Template.Spec
	granted := map[string][]corev1.Capability{
		"install":  nil,
		"ambientd": {"NET_ADMIN", "SYS_ADMIN", "SYS_PTRACE", "NET_BROADCAST"},
		"devproxy": {"NET_ADMIN", "SYS_ADMIN"},
	}
	for _, c := range slices.Concat(agent.InitContainers, agent.Containers, proxy.Containers) {
		s := c.SecurityContext
		if s == nil || s.Privileged != nil && *s.Privileged || s.AllowPrivilegeEscalation == nil || *s.AllowPrivilegeEscalation ||
			s.ReadOnlyRootFilesystem == nil || !*s.ReadOnlyRootFilesystem || s.RunAsUser == nil || *s.RunAsUser != 0 ||
			s.SeccompProfile == nil || s.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault ||
			s.Capabilities == nil || !slices.Equal(s.Capabilities.Drop, []corev1.Capability{"ALL"}) {
			t.Errorf("container %s: %+v", c.Name, s)
			continue
		}
		want, known := granted[c.Name]
		if !known || !slices.Equal(s.Capabilities.Add, want) {
			t.Errorf("container %s has %q, want %q", c.Name, s.Capabilities.Add, want)
		}
		if c.Resources.Limits.Memory().IsZero() || c.Resources.Requests.Memory().IsZero() || !c.Resources.Limits.Cpu().IsZero() {
			t.Errorf("container %s: resources %+v", c.Name, c.Resources)
		}
	}
}

// What the removal takes away is what the installation has put there, in the same places and
// with no more rights, before the plugin could hold back the Job's own pod.
func TestUninstallMirrorsInstall(t *testing.T) {
	agent := read[appsv1.DaemonSet](t, manifests, "DaemonSet").Spec.Template.Spec
	pod := read[batchv1.Job](t, "uninstall/*.yaml", "Job").Spec.Template.Spec
	install, uninstall := agent.InitContainers[0], pod.Containers[0]
	if install.Args[0] != "install" || uninstall.Args[0] != "uninstall" || !slices.Equal(install.Args[1:], uninstall.Args[1:]) {
		t.Errorf("%q is undone by %q", install.Args, uninstall.Args)
	}
	// All but name and arguments is the same.
	uninstall.Name, uninstall.Args = install.Name, install.Args
	if difference := cmp.Diff(install, uninstall); difference != "" {
		t.Errorf("the container differs (-install +uninstall):\n%s", difference)
	}
	for _, v := range pod.Volumes {
		if !slices.ContainsFunc(agent.Volumes, func(other corev1.Volume) bool { return cmp.Equal(v, other) }) {
			t.Errorf("volume %s is not the installation's", v.Name)
		}
	}
	if !pod.HostNetwork || pod.NodeName != "NODE" || !slices.Equal(pod.Tolerations, agent.Tolerations) {
		t.Errorf("hostNetwork %t, node %q, tolerations %v", pod.HostNetwork, pod.NodeName, pod.Tolerations)
	}
}

// Flags that are given must exist, in the very program.
func TestFlagsAreKnown(t *testing.T) {
	pod := read[appsv1.DaemonSet](t, manifests, "DaemonSet").Spec.Template.Spec
	program := build(t)
	job := read[batchv1.Job](t, "uninstall/*.yaml", "Job").Spec.Template.Spec
	for _, c := range slices.Concat(pod.InitContainers, pod.Containers, job.Containers) {
		help, err := exec.CommandContext(t.Context(), program, c.Args[0], "--help").CombinedOutput()
		if err != nil {
			t.Errorf("ambientd %s --help: %v: %s", c.Args[0], err, help)
		}
		for _, arg := range c.Args[1:] {
			flag, _, _ := strings.Cut(arg, "=")
			if !strings.Contains(string(help), "\n  "+flag+" ") {
				t.Errorf("ambientd %s knows no flag %s", c.Args[0], arg)
			}
		}
	}
}

// build builds the agent.
func build(t *testing.T) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), "ambientd")
	cmd := exec.CommandContext(t.Context(), "go", "build", "-o", program, "../nodeagent")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("building the agent: %v: %s", err, out)
	}
	return program
}
