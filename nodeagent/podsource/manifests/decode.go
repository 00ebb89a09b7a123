// SPDX-License-Identifier: Apache-2.0

package manifests

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	goyaml "go.yaml.in/yaml/v2"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	yamldocs "k8s.io/apimachinery/pkg/util/yaml"
	strictjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"

	"ambientd/nodeagent/workload"
)

// maxFileBytes bounds one manifest file. A pod's object in etcd is limited to 1.5 MiB.
const maxFileBytes = 2 << 20

// readTimeout bounds the wait for content that is not there yet.
const readTimeout = 500 * time.Millisecond

// maxUIDBytes bounds a UID; a UUID has 36. It has to fit into one message of the
// node proxy's protocol, together with everything else.
const maxUIDBytes = 128

// defaultServiceAccount is what the API server gives a pod that names none.
const defaultServiceAccount = "default"

// objects is what one file holds, in its order. The pods have no namespace
// labels yet.
type objects struct {
	pods       []workload.Pod
	namespaces []namespace
}

type namespace struct {
	name   string
	labels map[string]string
}

// isManifest says whether a file of this name is read. Editors' and kubelet's
// own files begin with a dot.
func isManifest(name string) bool {
	switch filepath.Ext(name) {
	case ".yaml", ".yml", ".json":
		return !strings.HasPrefix(name, ".")
	}
	return false
}

func readBounded(path string) (content []byte, err error) {
	// Without O_NONBLOCK, opening a named pipe waits for a writer.
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	// What can be waited for (a pipe, /proc/kmsg) is not waited for long; real files have no deadlines.
	if err := f.SetReadDeadline(time.Now().Add(readTimeout)); err != nil && !errors.Is(err, os.ErrNoDeadline) {
		return nil, err
	}
	content, err = io.ReadAll(io.LimitReader(f, maxFileBytes+1))
	if err != nil {
		return nil, err
	}
	if len(content) > maxFileBytes {
		return nil, fmt.Errorf("larger than %d bytes", maxFileBytes)
	}
	return content, nil
}

// decode reads a stream of YAML documents, or one of JSON, which is YAML too. Documents
// are decoded side by side: that is much of the time that an agent takes to start.
func decode(content []byte) (objects, error) {
	var documents [][]byte
	reader := yamldocs.NewYAMLReader(bufio.NewReader(bytes.NewReader(content)))
	for {
		document, err := reader.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return objects{}, fmt.Errorf("document %d: %w", len(documents)+1, err)
		}
		documents = append(documents, document)
	}
	parts := make([]objects, len(documents))
	errs := make([]error, len(documents))
	var work errgroup.Group
	work.SetLimit(runtime.GOMAXPROCS(0))
	const share = 8 // documents at a time, so that one is not less work than to start it
	for at := 0; at < len(documents); at += share {
		work.Go(func() error {
			for n := at; n < min(at+share, len(documents)); n++ {
				errs[n] = parts[n].add(documents[n])
			}
			return nil
		})
	}
	_ = work.Wait() // what went wrong is in errs
	var found objects
	for n, part := range parts {
		if errs[n] != nil {
			return objects{}, fmt.Errorf("document %d: %w", n+1, errs[n])
		}
		found.pods = append(found.pods, part.pods...)
		found.namespaces = append(found.namespaces, part.namespaces...)
	}
	return found, nil
}

// add decodes one document.
func (o *objects) add(document []byte) error {
	if err := checkAliases(document); err != nil {
		return err
	}
	asJSON, err := yaml.YAMLToJSONStrict(document)
	if err != nil {
		return err
	}
	if bytes.Equal(asJSON, []byte("null")) {
		return nil // nothing but comments
	}
	var kind metav1.TypeMeta
	if err := json.Unmarshal(asJSON, &kind); err != nil {
		return fmt.Errorf("not a Kubernetes object: %w", err)
	}
	switch kind {
	case metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}:
		return o.addPod(asJSON)
	case metav1.TypeMeta{APIVersion: "v1", Kind: "Namespace"}:
		return o.addNamespace(asJSON)
	}
	return fmt.Errorf("kind %q of apiVersion %q: only Pod and Namespace of v1 are read", kind.Kind, kind.APIVersion)
}

// checkAliases refuses a document that is larger than a file may be once its aliases
// are written out, as they are in JSON. The YAML library bounds how many values
// they make, and not how long those are: 1.5 MB would become 30 GB.
func checkAliases(document []byte) error {
	if !bytes.ContainsRune(document, '*') {
		return nil
	}
	var value any // in which all copies of a text share its memory
	if err := goyaml.Unmarshal(document, &value); err != nil {
		return err
	}
	if room(maxFileBytes, value) < 0 {
		return fmt.Errorf("larger than %d bytes when its aliases are written out", maxFileBytes)
	}
	return nil
}

// room is what is left of so many bytes after value, or less than zero.
func room(left int, value any) int {
	switch v := value.(type) {
	case string:
		return left - len(v)
	case []any:
		for _, item := range v {
			if left = room(left-1, item); left < 0 {
				break
			}
		}
	case map[any]any:
		for key, item := range v {
			if left = room(room(left-1, key), item); left < 0 {
				break
			}
		}
	}
	return left
}

func (o *objects) addPod(asJSON []byte) error {
	var pod corev1.Pod
	if err := strictly(asJSON, &pod); err != nil {
		return err
	}
	if pod.Namespace == "" {
		pod.Namespace = metav1.NamespaceDefault
	}
	if pod.UID == "" {
		pod.UID = types.UID(DerivedUID(pod.Namespace, pod.Name))
	}
	p := workload.FromPod(&pod, nil)
	if p.ServiceAccount == "" && !p.Static {
		p.ServiceAccount = defaultServiceAccount
	}
	if err := checkPod(p); err != nil {
		return err
	}
	o.pods = append(o.pods, p)
	return nil
}

func (o *objects) addNamespace(asJSON []byte) error {
	var ns corev1.Namespace
	if err := strictly(asJSON, &ns); err != nil {
		return err
	}
	if err := check("metadata.name", ns.Name, validation.IsDNS1123Label); err != nil {
		return err
	}
	o.namespaces = append(o.namespaces, namespace{name: ns.Name, labels: ns.Labels})
	return nil
}

// strictly decodes as the API server does with field validation on: names are
// case-sensitive, unknown and doubled ones are errors.
func strictly(asJSON []byte, object any) error {
	strictErrs, err := strictjson.UnmarshalStrict(asJSON, object)
	return errors.Join(append(strictErrs, err)...)
}

// checkPod applies the API server's rules to the names that become part of an
// identity or of a message.
func checkPod(p workload.Pod) error {
	err := errors.Join(
		check("metadata.name", p.Name, validation.IsDNS1123Subdomain),
		check("metadata.namespace", p.Namespace, validation.IsDNS1123Label),
		checkUID(p.UID),
	)
	if p.ServiceAccount != "" {
		err = errors.Join(err, check("spec.serviceAccountName", p.ServiceAccount, validation.IsDNS1123Subdomain))
	}
	return err
}

func check(field, value string, rule func(string) []string) error {
	if problems := rule(value); len(problems) > 0 {
		return fmt.Errorf("%s %q: %s", field, value, problems[0])
	}
	return nil
}

func checkUID(uid string) error {
	printable := func(r rune) bool { return '!' <= r && r <= '~' }
	if len(uid) > maxUIDBytes || strings.ContainsFunc(uid, func(r rune) bool { return !printable(r) }) {
		return fmt.Errorf("UID %q: must be at most %d printable ASCII characters", uid, maxUIDBytes)
	}
	return nil
}
