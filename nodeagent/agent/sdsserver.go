// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"

	"ambientd/certfetch/sds"
)

const (
	sdsConnectTimeout = 5 * time.Second // for the HTTP/2 preface
	sdsKeepalive      = time.Minute     // of silence, before a proxy is asked whether it is there
)

// sdsServer serves SDS over gRPC on a listener.
type sdsServer struct {
	listener net.Listener
	grpc     *grpc.Server
}

func newSDSServer(listener net.Listener, cfg sds.Config) (*sdsServer, error) {
	service, err := sds.NewServer(cfg)
	if err != nil {
		return nil, fmt.Errorf("making the SDS server: %w", err)
	}
	s := &sdsServer{listener: listener, grpc: grpc.NewServer(append(sds.Options(),
		grpc.ConnectionTimeout(sdsConnectTimeout),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: sdsKeepalive}),
	)...)}
	service.Register(s.grpc)
	return s, nil
}

// run serves until ctx ends, then closes all streams, and returns nil after that.
func (s *sdsServer) run(ctx context.Context) error {
	stopped := context.AfterFunc(ctx, s.grpc.Stop) // streams never end by themselves
	defer stopped()
	if err := s.grpc.Serve(s.listener); err != nil && ctx.Err() == nil {
		return fmt.Errorf("serving SDS on %s: %w", s.listener.Addr(), err)
	}
	return nil
}
