// SPDX-License-Identifier: Apache-2.0

// Package apiserver owns how the agent reaches the Kubernetes API server: where it is
// and with whose credentials, in which encoding, and what an operator can do about its
// refusals.
//
// It knows the core group alone: a client of all groups would cost each node megabytes.
// It refuses to know what the agent asks for.
package apiserver

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"strings"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
)

// Accept headers for objects of which only the metadata is sent: one or each of a watch,
// and a list.
const (
	PartialMetadata = "application/vnd.kubernetes.protobuf;as=PartialObjectMetadata;g=meta.k8s.io;v=v1," +
		"application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
	PartialMetadataList = "application/vnd.kubernetes.protobuf;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1," +
		"application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
)

// Config says how to reach the API server.
type Config struct {
	Kubeconfig string // path; empty: as a pod of the cluster does, by its service account
	UserAgent  string // in the API server's log
}

// Client speaks to the API server about the core group.
type Client struct {
	rest.Interface

	// Host is the API server's URL, for the log.
	Host string

	parameters runtime.ParameterCodec
}

// New returns a client. It does not connect yet.
func New(cfg Config) (*Client, error) {
	base, err := cfg.load()
	if err != nil {
		return nil, err
	}
	scheme := runtime.NewScheme()
	if err := errors.Join(corev1.AddToScheme(scheme), metav1.AddMetaToScheme(scheme)); err != nil {
		return nil, fmt.Errorf("registering the types of the API: %w", err)
	}
	base.UserAgent = cfg.UserAgent
	base.APIPath = "/api"
	base.GroupVersion = &corev1.SchemeGroupVersion
	base.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	base.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	base.ContentType = runtime.ContentTypeProtobuf
	// Whoever asks bounds himself: a limit for all would let a pod's start wait for what is
	// not urgent. The API server has its own fairness besides.
	base.QPS = -1
	base.WarningHandler = rest.NoWarnings{}
	client, err := rest.RESTClientFor(base)
	if err != nil {
		return nil, fmt.Errorf("making a client of the API server: %w", err)
	}
	return &Client{Interface: client, Host: base.Host, parameters: runtime.NewParameterCodec(scheme)}, nil
}

func (c Config) load() (*rest.Config, error) {
	if c.Kubeconfig != "" {
		loaded, err := clientcmd.BuildConfigFromFlags("", c.Kubeconfig)
		if err != nil {
			return nil, fmt.Errorf("reading kubeconfig %s: %w", c.Kubeconfig, err)
		}
		return loaded, nil
	}
	loaded, err := rest.InClusterConfig()
	if errors.Is(err, rest.ErrNotInCluster) {
		return nil, errors.New("the agent does not run as a pod of a cluster (KUBERNETES_SERVICE_HOST is not set): name a file with --kubeconfig")
	}
	if err != nil {
		return nil, fmt.Errorf("reading the pod's own credentials: %w", err)
	}
	return loaded, nil
}

// Get begins a read of the resource with these options.
func (c *Client) Get(resource string, options *metav1.ListOptions) *rest.Request {
	return c.Interface.Get().Resource(resource).VersionedParams(options, c.parameters)
}

// Explain adds to an error of the API server what an operator can do about it, and
// leaves out which URL was asked for: that is long and says nothing to him.
func Explain(err error) error {
	if failed, ok := errors.AsType[*url.Error](err); ok {
		err = fmt.Errorf("API server: %w", failed.Err)
	}
	switch {
	case apierrors.IsForbidden(err) && isByPolicy(err):
		return err // in whose words is what to do, and the role would not help
	case apierrors.IsForbidden(err):
		return fmt.Errorf("%w; give the agent's account the ClusterRole of deploy/manifests", err)
	case apierrors.IsUnauthorized(err):
		return fmt.Errorf("%w; the API server does not know the agent's credentials: see its service account, or --kubeconfig", err)
	}
	return err
}

// isByPolicy tells whether an admission policy or a webhook has refused what the account has
// the right to. The API server marks that nowhere but in the text.
func isByPolicy(err error) bool {
	return strings.Contains(err.Error(), " denied request: ") || strings.Contains(err.Error(), " denied the request: ")
}

// WithLog returns a context with which the Kubernetes libraries log to logger, for
// debugging only: what matters of what they do, their callers tell.
func WithLog(ctx context.Context, logger *slog.Logger) context.Context {
	return klog.NewContext(ctx, logr.FromSlogHandler(demoted{logger.Handler()}))
}

// demoted is a handler by which everything is for debugging.
type demoted struct{ slog.Handler }

// mostVerbose is as far as the Kubernetes libraries may go: beyond, they write whole
// answers of the API server.
const mostVerbose = slog.Level(-2)

// Enabled is part of slog.Handler, as the next three.
func (d demoted) Enabled(ctx context.Context, level slog.Level) bool {
	return level >= mostVerbose && d.Handler.Enabled(ctx, slog.LevelDebug)
}

// Handle asks itself, because logr does not before it hands over an error.
func (d demoted) Handle(ctx context.Context, record slog.Record) error {
	record.Level = slog.LevelDebug
	if !d.Handler.Enabled(ctx, record.Level) {
		return nil
	}
	return d.Handler.Handle(ctx, record)
}

// WithAttrs passes on.
func (d demoted) WithAttrs(attrs []slog.Attr) slog.Handler {
	return demoted{d.Handler.WithAttrs(attrs)}
}

// WithGroup passes on.
func (d demoted) WithGroup(name string) slog.Handler { return demoted{d.Handler.WithGroup(name)} }
