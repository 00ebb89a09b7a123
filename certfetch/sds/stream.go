// SPDX-License-Identifier: Apache-2.0

package sds

import (
	"context"
	"maps"
	"strconv"

	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"ambientd/certfetch"
)

// maxLogged is how many bytes of a proxy's own words go into the log.
const maxLogged = 300

// stream is what one StreamSecrets call knows of its client. It belongs to that call's goroutine.
//
// Every response holds all that the stream names and that exists, so that what is missing in it
// has been removed (the state-of-the-world variant of the xDS protocol).
type stream struct {
	server       *Server
	subscription *certfetch.Subscription
	send         func(*discoveryv3.DiscoveryResponse) error

	names names
	// sent is the version of each resource in the last response, accepted or not: a response is
	// worth sending if it would differ from that.
	sent versions
	// responses counts them; the last one's number is its nonce.
	responses uint64
}

func newStream(server *Server, subscription *certfetch.Subscription, send func(*discoveryv3.DiscoveryResponse) error) *stream {
	return &stream{server: server, subscription: subscription, send: send, sent: make(versions)}
}

// handle takes a request: the first one, an ACK, a NACK, or another list of names, which are the
// same but for their fields.
func (st *stream) handle(ctx context.Context, request *discoveryv3.DiscoveryRequest) error {
	wanted, err := parseRequest(request)
	if err != nil {
		return err
	}
	if st.responses > 0 && request.GetResponseNonce() != st.nonce() {
		// It was written before the client saw the last response, and says nothing about that. The
		// client answers that one too, with the names that it wants by then.
		return nil
	}
	if detail := request.GetErrorDetail(); detail != nil {
		st.server.logger.WarnContext(ctx, "proxy rejected secrets", "names", wanted.String(),
			"nonce", st.nonce(), "code", codes.Code(detail.GetCode()).String(), "reason", shorten(detail.GetMessage()))
	}
	if err := st.subscribe(wanted); err != nil {
		return err
	}
	return st.push()
}

// subscribe makes wanted the names of the stream. New ones must exist; those that the stream had
// already may have gone meanwhile, which push has told or will tell.
func (st *stream) subscribe(wanted names) error {
	for name, id := range st.names {
		if _, still := wanted[name]; !still {
			delete(st.sent, name) // asked for again later, it is news again
			if !id.IsZero() {
				st.subscription.Unwatch(id)
			}
		}
	}
	added := make(names)
	for name, id := range wanted {
		if _, had := st.names[name]; had {
			continue
		}
		added[name] = id
		if !id.IsZero() {
			st.subscription.Watch(id)
		}
	}
	st.names = wanted
	found, err := st.server.lookUp(added)
	if err != nil {
		return err
	}
	if found.registered < found.identities {
		return errNotPermitted()
	}
	return nil
}

// push sends what there is for the stream's names, if that is not what the client was sent last. It
// returns an error, which ends the stream, when none of the identities named exists any more.
func (st *stream) push() error {
	found, err := st.server.lookUp(st.names)
	if err != nil {
		return err
	}
	if now := found.versions(); !maps.Equal(now, st.sent) {
		st.responses++
		response, err := found.response(st.nonce())
		if err != nil {
			return err
		}
		if err := st.send(response); err != nil {
			return err
		}
		st.sent = now
	}
	if found.identities > 0 && found.registered == 0 {
		return errNotPermitted()
	}
	return nil
}

// nonce is the last response's.
func (st *stream) nonce() string { return strconv.FormatUint(st.responses, 10) }

// parseRequest checks what does not depend on the stream.
func parseRequest(request *discoveryv3.DiscoveryRequest) (names, error) {
	// The service implies the type; only a wrong one is an error.
	if url := request.GetTypeUrl(); url != "" && url != TypeURL {
		return nil, status.Errorf(codes.InvalidArgument, "resource type %q is not %s", shorten(url), TypeURL)
	}
	return parseNames(request.GetResourceNames())
}

func shorten(s string) string {
	if len(s) > maxLogged {
		return s[:maxLogged] + "…"
	}
	return s
}
