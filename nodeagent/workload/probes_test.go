// SPDX-License-Identifier: Apache-2.0

package workload_test

import (
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"ambientd/nodeagent/workload"
)

// TestProbes: manifests as people write them, and the ports that kubelet dials.
func TestProbes(t *testing.T) {
	for _, test := range []struct {
		name, spec string
		want       []uint16
	}{
		{"none", `containers: [{name: a, ports: [{containerPort: 80}]}]`, nil},
		{"each handler, in order and once", `
containers:
- name: a
  livenessProbe: {httpGet: {port: 8081, path: /}}
  readinessProbe: {tcpSocket: {port: 8080}}
  startupProbe: {grpc: {port: 9090, service: a}}
- name: b
  livenessProbe: {httpGet: {port: 8080}}
`, []uint16{8080, 8081, 9090}},
		{"exec dials nothing", `containers: [{name: a, livenessProbe: {exec: {command: ["true"]}}}]`, nil},
		{"named port of its own container", `
containers:
- name: a
  ports: [{name: health, containerPort: 8080}]
  livenessProbe: {httpGet: {port: health}}
- name: b
  ports: [{name: health, containerPort: 8090}, {name: other, containerPort: 7}]
  readinessProbe: {tcpSocket: {port: health}}
`, []uint16{8080, 8090}},
		{"another container's name", `
containers:
- name: a
  ports: [{name: health, containerPort: 8080}]
- name: b
  livenessProbe: {httpGet: {port: health}}
`, nil},
		{"number as text", `containers: [{name: a, livenessProbe: {httpGet: {port: "8080"}}}]`, []uint16{8080}},
		{"a name that is a number wins", `
containers:
- name: a
  ports: [{name: "80", containerPort: 8080}]
  livenessProbe: {httpGet: {port: "80"}}
`, []uint16{8080}},
		{"no port", `
containers:
- {name: a, livenessProbe: {httpGet: {port: 0}}, readinessProbe: {tcpSocket: {port: 65536}}, startupProbe: {tcpSocket: {port: -1}}}
`, nil},
		{"last port", `containers: [{name: a, livenessProbe: {tcpSocket: {port: 65535}}}]`, []uint16{65535}},
		{"a process of the node", `
containers:
- {name: a, livenessProbe: {httpGet: {host: 127.0.0.1, port: 1}}, readinessProbe: {tcpSocket: {host: localhost, port: 2}}, startupProbe: {httpGet: {host: "::1", port: 3}}}
`, nil},
		{"perhaps the pod by another name", `
containers:
- {name: a, livenessProbe: {httpGet: {host: web.shop.svc, port: 1}}, readinessProbe: {tcpSocket: {host: 10.0.0.2, port: 2}}}
`, []uint16{1, 2}},
		{"restartable init container", `
initContainers:
- {name: i, restartPolicy: Always, startupProbe: {httpGet: {port: 8082}}}
containers: [{name: a}]
`, []uint16{8082}},
		{"init container that ends", `
initContainers:
- {name: i, startupProbe: {httpGet: {port: 8082}}}
containers: [{name: a}]
`, nil},
		{"hooks", `
containers:
- name: a
  ports: [{name: admin, containerPort: 9901}]
  lifecycle:
    postStart: {httpGet: {port: admin}}
    preStop: {httpGet: {port: 9902}}
- name: b
  lifecycle:
    postStart: {exec: {command: ["true"]}}
    preStop: {sleep: {seconds: 1}}
`, []uint16{9901, 9902}},
	} {
		t.Run(test.name, func(t *testing.T) {
			var pod corev1.Pod
			if err := yaml.UnmarshalStrict([]byte(test.spec), &pod.Spec); err != nil {
				t.Fatal(err)
			}
			if got := workload.FromPod(&pod, nil).Probes; !slices.Equal(got, test.want) {
				t.Errorf("got %v, want %v", got, test.want)
			}
		})
	}
}
