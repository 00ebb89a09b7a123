// SPDX-License-Identifier: Apache-2.0

package install

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
)

// chainable are the CNI versions that our plugin speaks.
func chainable() []string { return []string{"0.3.1", "0.4.0", "1.0.0", "1.1.0"} }

// conflist is a list of plugins as its file has it: bytes, with marks where things are.
type conflist struct {
	content []byte
	begin   int // behind the "[" of the plugins
	plugins []element
}

// element is a value within a text.
type element struct {
	start, end int
	ours       bool
}

// parseList reads a .conflist.
func parseList(content []byte) (conflist, error) {
	list := conflist{content: content}
	keys, err := members(content)
	if err != nil {
		return list, err
	}
	plugins, ok := keys["plugins"]
	if !ok {
		return list, errors.New(`it has no key "plugins"`)
	}
	if err := checkVersion(content, keys); err != nil {
		return list, err
	}
	list.begin = plugins.start + 1
	list.plugins, err = elements(content, plugins)
	return list, err
}

// checkVersion refuses a list that would not work with our plugin in it.
func checkVersion(content []byte, keys map[string]element) error {
	var version string
	if v, ok := keys["cniVersion"]; ok {
		if err := json.Unmarshal(content[v.start:v.end], &version); err != nil {
			return fmt.Errorf("cniVersion: %w", err)
		}
	}
	if !slices.Contains(chainable(), version) {
		return fmt.Errorf("it has cniVersion %q, and plugins are chained by ambientd in versions %q", version, chainable())
	}
	return nil
}

// members finds the values of an object, which must be all that there is.
func members(content []byte) (map[string]element, error) {
	var whole json.RawMessage
	if err := json.Unmarshal(content, &whole); err != nil {
		return nil, err
	}
	decoder := json.NewDecoder(bytes.NewReader(content))
	if token, err := decoder.Token(); err != nil || token != json.Delim('{') {
		return nil, errors.New("it is no JSON object")
	}
	found := map[string]element{}
	for decoder.More() {
		token, err := decoder.Token()
		if err != nil {
			return nil, err
		}
		key := fmt.Sprint(token) // of an object: a string
		value, err := next(decoder)
		if err != nil {
			return nil, err
		}
		if _, twice := found[key]; twice {
			return nil, fmt.Errorf("key %q is there twice", key)
		}
		found[key] = value
	}
	return found, nil
}

// next finds the value that the decoder comes to.
func next(decoder *json.Decoder) (element, error) {
	var raw json.RawMessage
	if err := decoder.Decode(&raw); err != nil {
		return element{}, err
	}
	end := int(decoder.InputOffset())
	return element{start: end - len(raw), end: end}, nil
}

// elements finds the plugins of a list.
func elements(content []byte, list element) ([]element, error) {
	decoder := json.NewDecoder(bytes.NewReader(content[list.start:list.end]))
	if token, err := decoder.Token(); err != nil || token != json.Delim('[') {
		return nil, errors.New(`"plugins" is no list`)
	}
	var found []element
	for decoder.More() {
		e, err := next(decoder)
		if err != nil {
			return nil, err
		}
		e.start, e.end = e.start+list.start, e.end+list.start
		var plugin struct {
			Type string `json:"type"`
		}
		if err := json.Unmarshal(content[e.start:e.end], &plugin); err != nil {
			return nil, fmt.Errorf("plugin %d: %w", len(found)+1, err)
		}
		e.ours = plugin.Type == PluginName
		found = append(found, e)
	}
	return found, nil
}

// foreign are the plugins that are not ours.
func (l conflist) foreign() []element {
	return slices.DeleteFunc(slices.Clone(l.plugins), func(e element) bool { return e.ours })
}

// chained tells whether our entry is there once, and last, behind others.
func (l conflist) chained() bool {
	n := len(l.plugins)
	return n > 1 && l.plugins[n-1].ours && len(l.foreign()) == n-1
}

// with returns the text with our entry once, and last. It is the same text if it says so
// already, in whatever spelling.
func (l conflist) with(entry []byte) ([]byte, error) {
	foreign := l.foreign()
	if len(foreign) == 0 {
		return nil, errors.New("it has no plugin behind which ours could be chained")
	}
	last := l.plugins[len(l.plugins)-1]
	if l.chained() && sameJSON(l.content[last.start:last.end], entry) {
		return l.content, nil
	}
	// As the plugin before it stands behind its own.
	separator := slices.Concat([]byte(","), l.content[l.begin:l.plugins[0].start])
	if n := len(foreign); n > 1 {
		separator = l.before(foreign[n-1])
	}
	return l.rebuild(slices.Concat(separator, entry)), nil
}

// without returns the text without our entry: what it was before, byte for byte, if with
// made it.
func (l conflist) without() []byte {
	if len(l.foreign()) == len(l.plugins) {
		return l.content
	}
	return l.rebuild(nil)
}

// rebuild keeps the foreign plugins, each with what stands before it, and appends a text.
func (l conflist) rebuild(appended []byte) []byte {
	first, last := l.plugins[0], l.plugins[len(l.plugins)-1]
	text := slices.Clone(l.content[:first.start])
	for i, e := range l.foreign() {
		if i > 0 {
			text = append(text, l.before(e)...)
		}
		text = append(text, l.content[e.start:e.end]...)
	}
	text = append(text, appended...)
	return append(text, l.content[last.end:]...)
}

// before is what separates a plugin that is not the first from the one before it.
func (l conflist) before(e element) []byte {
	i := slices.Index(l.plugins, e)
	return l.content[l.plugins[i-1].end:e.start]
}

// sameJSON compares two values, numbers as they are written.
func sameJSON(a, b []byte) bool {
	decode := func(text []byte) (value any) {
		decoder := json.NewDecoder(bytes.NewReader(text))
		decoder.UseNumber()
		if decoder.Decode(&value) != nil {
			return nil
		}
		return value
	}
	return reflect.DeepEqual(decode(a), decode(b))
}

// listOf makes a list of a single plugin's configuration, which stays as it is written, and
// our entry.
func listOf(conf, entry []byte) ([]byte, error) {
	keys, err := members(conf)
	if err != nil {
		return nil, err
	}
	if err := checkVersion(conf, keys); err != nil {
		return nil, err
	}
	for _, key := range []string{"name", "type"} {
		if _, ok := keys[key]; !ok {
			return nil, fmt.Errorf("it has no key %q", key)
		}
	}
	value := func(key string) []byte { return conf[keys[key].start:keys[key].end] }
	return fmt.Appendf(nil, "{\n  \"cniVersion\": %s,\n  \"name\": %s,\n  \"plugins\": [\n    %s,\n    %s\n  ]\n}\n",
		value("cniVersion"), value("name"), bytes.TrimSpace(conf), entry), nil
}
