// SPDX-License-Identifier: Apache-2.0

// Devproxy is a small stand-in for ztunnel, for development and tests of
// ambientd on one machine: it takes pods over by ZDS, certificates by SDS, and
// carries the traffic between pods of the mesh in mutual TLS.
//
// It shows that what the agent sets up works. It is no data plane for
// production: it knows one node, no services, no policies, and does not care
// how fast it is.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"
	"strings"
	"syscall"
	"time"

	secretv3 "github.com/envoyproxy/go-control-plane/envoy/service/secret/v3"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"

	"ambientd/certfetch/spiffeid"
	"ambientd/tools/devproxy/peers"
	"ambientd/tools/devproxy/pods"
	"ambientd/tools/devproxy/svid"
	"ambientd/tools/devproxy/zdsclient"
)

// version is set by the linker: -ldflags "-X main.version=v1.2.3".
var version string

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stderr)
	stop()
	os.Exit(report(err, os.Stderr))
}

// report prints what went wrong, once, and returns the exit code: as ambientd's, 2 for a command
// line that cannot be used and 1 for the rest.
func report(err error, stderr io.Writer) int {
	if err == nil || errors.Is(err, flag.ErrHelp) {
		return 0
	}
	fmt.Fprintln(stderr, "devproxy:", err)
	if _, ok := errors.AsType[*usageError](err); ok {
		return 2
	}
	return 1
}

// usageError is a command line that cannot be used.
type usageError struct{ err error }

func (e *usageError) Error() string { return e.err.Error() + "; see `devproxy --help`" }

func (e *usageError) Unwrap() error { return e.err }

// config is what the flags say.
type config struct {
	zdsSocket   string
	sdsSocket   string
	adminSocket string
	trustDomain string
	nack        patterns
	deny        patterns
	logFormat   string
	original    bool
}

type patterns []string

// String joins the patterns, for flag's usage text.
func (p *patterns) String() string { return strings.Join(*p, ", ") }

// Set adds a pattern.
func (p *patterns) Set(s string) error {
	*p = append(*p, s)
	return nil
}

// parse reads the command line. On --help it prints help and returns flag.ErrHelp.
func parse(args []string, help io.Writer) (config, error) {
	var c config
	flags := flag.NewFlagSet("devproxy", flag.ContinueOnError)
	flags.SetOutput(io.Discard) // errors are returned, help is printed below
	flags.StringVar(&c.zdsSocket, "zds-socket", "/var/run/ztunnel/ztunnel.sock", "`path` of the agent's ZDS socket")
	flags.StringVar(&c.sdsSocket, "sds-socket", "/run/ambientd/sds/sds.sock", "`path` of the agent's SDS socket")
	flags.StringVar(&c.adminSocket, "admin-socket", "/run/ambientd/private/admin.sock", "`path` of the agent's admin socket, asked which address has which identity")
	flags.StringVar(&c.trustDomain, "trust-domain", "cluster.local", "SPIFFE trust `domain` of all identities")
	flags.Var(&c.nack, "nack", "refuse pods whose namespace/name matches the `pattern` (of Go's path.Match); may be repeated")
	flags.Var(&c.deny, "deny", "let nobody connect to pods whose namespace/name matches the `pattern`, as a policy that denies all; may be repeated")
	flags.StringVar(&c.logFormat, "log-format", "text", "`format` of the log on standard error, text or json")
	flags.BoolVar(&c.original, "original-source", true, "let applications see the client's own address; needs the redirection's rules and routes in the pod")
	if err := flags.Parse(args); errors.Is(err, flag.ErrHelp) {
		flags.SetOutput(help)
		flags.Usage()
		return config{}, err
	} else if err != nil {
		return config{}, &usageError{err}
	}
	if flags.NArg() > 0 {
		return config{}, &usageError{fmt.Errorf("unexpected argument %q", flags.Arg(0))}
	}
	return c, nil
}

func run(ctx context.Context, args []string, stderr io.Writer) error {
	cfg, err := parse(args, stderr)
	if err != nil {
		return err
	}
	log, err := newLogger(cfg.logFormat, stderr)
	if err != nil {
		return err
	}
	trustDomain, err := spiffeid.ParseTrustDomain(cfg.trustDomain)
	if err != nil {
		return &usageError{fmt.Errorf("--trust-domain: %w", err)}
	}
	log.Info("starting", "version", buildVersion(), "trust_domain", cfg.trustDomain,
		"zds_socket", cfg.zdsSocket, "sds_socket", cfg.sdsSocket, "admin_socket", cfg.adminSocket)
	sds, err := dialSDS(cfg.sdsSocket)
	if err != nil {
		return err
	}
	defer sds.Close()
	store := svid.New(svid.Config{Client: secretv3.NewSecretDiscoveryServiceClient(sds), Logger: log})

	source := pods.PodSource
	if cfg.original {
		source = pods.OriginalSource
	}
	manager, err := pods.NewManager(pods.Config{
		TrustDomain:  trustDomain,
		Certificates: store,
		Peers:        peers.Agent{Socket: cfg.adminSocket},
		Source:       source,
		Refuse:       cfg.nack,
		Deny:         cfg.deny,
		Logger:       log,
	})
	if err != nil {
		return &usageError{fmt.Errorf("--nack or --deny: %w", err)}
	}
	defer manager.Close()
	zds := zdsclient.New(zdsclient.Config{Socket: cfg.zdsSocket, Handler: manager, Logger: log})

	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return store.Run(ctx) })
	group.Go(func() error { return zds.Run(ctx) })
	return group.Wait()
}

// buildVersion is what the linker was told, or else what the Go tool recorded.
func buildVersion() string {
	if version != "" {
		return version
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		return info.Main.Version
	}
	return "unknown"
}

func newLogger(format string, w io.Writer) (*slog.Logger, error) {
	switch format {
	case "text":
		return slog.New(slog.NewTextHandler(w, nil)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(w, nil)), nil
	default:
		return nil, &usageError{fmt.Errorf("--log-format: %q is neither text nor json", format)}
	}
}

// dialSDS connects when the first stream is opened, and again within seconds
// when the agent has been away.
func dialSDS(socket string) (*grpc.ClientConn, error) {
	conn, err := grpc.NewClient("unix:"+socket,
		grpc.WithTransportCredentials(insecure.NewCredentials()), // the socket's mode and peer check protect it
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 2, Jitter: 0.5, MaxDelay: 2 * time.Second},
			MinConnectTimeout: 2 * time.Second,
		}))
	if err != nil {
		return nil, fmt.Errorf("connecting to the agent's SDS socket: %w", err)
	}
	return conn, nil
}
