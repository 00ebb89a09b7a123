// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"reflect"
	"slices"
	"strings"

	yamldocs "k8s.io/apimachinery/pkg/util/yaml"
	strictjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"

	"ambientd/nodeagent/workload"
)

// maxConfigBytes bounds the configuration file.
const maxConfigBytes = 1 << 20

// keySelectors is the one key that has no flag.
const keySelectors = "selectors"

// readFile applies the configuration file at path. The error names the file and,
// one line each, every key that is wrong.
func (s *settings) readFile(path string) error {
	content, err := readBounded(path)
	if err != nil {
		return fmt.Errorf("configuration file: %w", err)
	}
	values, err := decode(content)
	if err != nil {
		return fmt.Errorf("configuration file %s: %w", path, err)
	}
	var errs []error
	for _, key := range slices.Sorted(maps.Keys(values)) {
		if err := s.setKey(key, values[key]); err != nil {
			errs = append(errs, fmt.Errorf("configuration file %s: %w", path, err))
		}
	}
	return errors.Join(errs...)
}

func readBounded(path string) (content []byte, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	content, err = io.ReadAll(io.LimitReader(f, maxConfigBytes+1))
	if err == nil && len(content) > maxConfigBytes {
		err = fmt.Errorf("%s is larger than %d bytes", path, maxConfigBytes)
	}
	return content, err
}

// decode returns the values of a YAML file's only document.
func decode(content []byte) (map[string]json.RawMessage, error) {
	var values map[string]json.RawMessage
	documents := yamldocs.NewYAMLReader(bufio.NewReader(bytes.NewReader(content)))
	for {
		document, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return values, nil
		}
		if err != nil {
			return nil, err
		}
		asJSON, err := yaml.YAMLToJSONStrict(document)
		switch {
		case err != nil:
			return nil, err
		case bytes.Equal(asJSON, []byte("null")): // nothing but comments
		case values != nil:
			return nil, errors.New("has more than one document")
		case json.Unmarshal(asJSON, &values) != nil:
			return nil, errors.New("must be keys with values")
		}
	}
}

// setKey applies one key.
func (s *settings) setKey(key string, value json.RawMessage) error {
	if key == keySelectors {
		return s.setSelectors(value)
	}
	name, ok := s.keys[key]
	if !ok {
		return fmt.Errorf("unknown key %q%s", key, s.suggestion(key))
	}
	if err := set(s.flags.set.Lookup(name).Value, value); err != nil {
		return fmt.Errorf("key %s: value %.100s: %w", key, value, err)
	}
	return nil
}

func (s *settings) setSelectors(value json.RawMessage) error {
	var specs []workload.SelectorSpec
	errs, err := strictjson.UnmarshalStrict(value, &specs)
	if err != nil {
		errs = append(errs, inOurWords(err))
	}
	if len(errs) > 0 {
		return fmt.Errorf("key %s: %w", keySelectors, sentence(errs))
	}
	s.cfg.Selectors = specs
	return nil
}

// sentence makes one error of several, in one line.
func sentence(errs []error) error {
	joined := errs[0]
	for _, err := range errs[1:] {
		joined = fmt.Errorf("%w; %w", joined, err)
	}
	return joined
}

// inOurWords says what is expected where package json names Go's type.
func inOurWords(err error) error {
	mismatch, ok := errors.AsType[*json.UnmarshalTypeError](err)
	if !ok {
		return err
	}
	found, _, _ := strings.Cut(mismatch.Value, " ") // "number 5"
	text := fmt.Sprintf("expected %s, found %s", kindInYAML(mismatch.Type), map[string]string{
		"array": "a list", "object": "keys with values", "string": "a string", "number": "a number", "bool": "a boolean",
	}[found])
	if mismatch.Field == "" {
		return errors.New(text)
	}
	return fmt.Errorf("%s: %s", mismatch.Field, text)
}

// kindInYAML names what is decoded into a Go type.
func kindInYAML(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Slice:
		return "a list"
	case reflect.Struct, reflect.Map:
		return "keys with values"
	case reflect.String:
		return "a string"
	}
	return "another kind of value"
}

// suggestion is for keys that are misspelt, or were written as the flag.
func (s *settings) suggestion(key string) string {
	if near := didYouMean(key, append(slices.Collect(maps.Keys(s.keys)), keySelectors)); near != "" {
		return near
	}
	return "; `ambientd run --help` lists the flags, whose names in camelCase are the keys"
}

// set gives a flag the value that a key has in JSON.
func set(target flag.Value, value json.RawMessage) error {
	var decoded any
	if err := json.Unmarshal(value, &decoded); err != nil {
		return err
	}
	items, isList := target.(*list)
	switch v := decoded.(type) {
	case nil:
		return errors.New("must not be empty")
	case string:
		return target.Set(v)
	case bool, float64:
		if isList {
			return errors.New("must be a list")
		}
		return target.Set(string(value))
	case []any:
		if !isList {
			return errors.New("must be a single value")
		}
		texts := make([]string, 0, len(v))
		for i, item := range v {
			text, ok := item.(string)
			if !ok {
				return fmt.Errorf("item %d must be a string", i+1)
			}
			texts = append(texts, text)
		}
		return items.setItems(texts)
	}
	return errors.New("must be a single value")
}
