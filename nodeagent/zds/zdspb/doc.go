// SPDX-License-Identifier: Apache-2.0

// Package zdspb holds the generated messages of ZDS (protobuf package
// istio.workload.zds). It owns the wire format of one message and nothing
// else: how messages become packets is package packet's, in what order they
// go is package zds's.
//
// Generated with Debian's protobuf-compiler and the protoc-gen-go of the
// google.golang.org/protobuf version in go.mod.
package zdspb

//go:generate go build -o ../../../bin/protoc-gen-go google.golang.org/protobuf/cmd/protoc-gen-go
//go:generate protoc --plugin=protoc-gen-go=../../../bin/protoc-gen-go --go_out=. --go_opt=paths=source_relative zds.proto
