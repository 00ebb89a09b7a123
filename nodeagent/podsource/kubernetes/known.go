// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"sync"

	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/client-go/tools/cache"
)

// objectName names an object of one kind; a namespace has no namespace.
type objectName struct{ namespace, name string }

func nameOf(i *item) objectName { return objectName{i.Namespace, i.Name} }

// known is what is known of the objects of one kind: what has been watched, and what
// was read ahead of the watch. It is the store of a reflector.
type known struct {
	changed func()                // called after a change that counts
	differs func(a, b *item) bool // whether it counts

	mu      sync.RWMutex
	watched map[objectName]*item
	ahead   map[objectName]*item // read from the API server, and not passed by the watch yet
	version string               // up to which objects have been watched
	synced  chan struct{}        // closed once watched is whole
	failure error                // why it may be old; nil while the watch goes on
}

func newKnown(changed func(), differs func(a, b *item) bool) *known {
	return &known{
		changed: changed, differs: differs,
		watched: map[objectName]*item{}, ahead: map[objectName]*item{}, synced: make(chan struct{}),
	}
}

// Transformer is part of cache.TransformingStore: what the reflector gathers is cut down,
// too.
func (k *known) Transformer() cache.TransformFunc { return trim }

// Add is part of cache.ReflectorStore, as the next four.
func (k *known) Add(object any) error {
	i, err := asItem(object)
	if err != nil {
		return err
	}
	k.mu.Lock()
	before := k.find(nameOf(i))
	k.watched[nameOf(i)] = i
	k.pass(i.ResourceVersion)
	k.mu.Unlock()
	if before == nil || k.differs(before, i) {
		k.changed()
	}
	return nil
}

// Update is Add.
func (k *known) Update(object any) error { return k.Add(object) }

// Delete removes the object.
func (k *known) Delete(object any) error {
	i, err := asItem(object)
	if err != nil {
		return err
	}
	k.mu.Lock()
	delete(k.watched, nameOf(i))
	k.pass(i.ResourceVersion)
	k.mu.Unlock()
	k.changed()
	return nil
}

// Replace takes objects for all that there are.
func (k *known) Replace(objects []any, version string) error {
	watched := make(map[objectName]*item, len(objects))
	for _, object := range objects {
		i, err := asItem(object)
		if err != nil {
			return err
		}
		watched[nameOf(i)] = i
	}
	k.mu.Lock()
	k.watched = watched
	k.pass(version)
	k.failure = nil
	select {
	case <-k.synced:
	default:
		close(k.synced)
	}
	k.mu.Unlock()
	k.changed()
	return nil
}

// Resync does nothing: whoever looks sees everything.
func (k *known) Resync() error { return nil }

// Bookmark is part of cache.ReflectorBookmarkStore.
func (k *known) Bookmark(version string) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.pass(version)
	return nil
}

// pass notes that the watch has come to version. What was read ahead of it before has
// been watched now, or is gone. The caller holds mu.
func (k *known) pass(version string) {
	k.version = version
	for name, i := range k.ahead {
		if k.hasPassed(i) {
			delete(k.ahead, name)
		}
	}
}

// hasPassed tells whether the watch has come to the item's version. The caller holds mu.
func (k *known) hasPassed(i *item) bool {
	order, err := resourceversion.CompareResourceVersion(i.ResourceVersion, k.version)
	return err == nil && order <= 0
}

// readAhead notes what was read from the API server, unless the watch has come so far by
// now: then the object is known, or gone since.
func (k *known) readAhead(i *item) {
	k.mu.Lock()
	ahead := !k.hasPassed(i)
	if ahead {
		k.ahead[nameOf(i)] = i
	}
	k.mu.Unlock()
	if ahead {
		k.changed()
	}
}

// find returns the object as it was seen last, nil if there is none. The caller holds
// mu.
func (k *known) find(name objectName) *item {
	if i, ok := k.ahead[name]; ok {
		return i
	}
	return k.watched[name]
}

// get is find for everybody else.
func (k *known) get(name objectName) (*item, bool) {
	k.mu.RLock()
	defer k.mu.RUnlock()
	i := k.find(name)
	return i, i != nil
}

// all returns all objects, and whether no others can be there.
func (k *known) all() (items []*item, complete bool) {
	k.mu.RLock()
	defer k.mu.RUnlock()
	items = make([]*item, 0, len(k.watched)+len(k.ahead))
	for name, i := range k.watched {
		if newer, ok := k.ahead[name]; ok {
			i = newer
		}
		items = append(items, i)
	}
	for name, i := range k.ahead {
		if _, ok := k.watched[name]; !ok {
			items = append(items, i)
		}
	}
	return items, k.failure == nil && k.isSynced()
}

func (k *known) isSynced() bool {
	select {
	case <-k.synced:
		return true
	default:
		return false
	}
}

// note notes that the watch fails, or with nil that it goes on, and returns what was so
// before.
func (k *known) note(failure error) (before error) {
	k.mu.Lock()
	before, k.failure = k.failure, failure
	k.mu.Unlock()
	if (before == nil) != (failure == nil) {
		k.changed() // the list is complete now, or not any more
	}
	return before
}

func (k *known) lastFailure() error {
	k.mu.RLock()
	defer k.mu.RUnlock()
	return k.failure
}

func asItem(object any) (*item, error) {
	trimmed, err := trim(object)
	if err != nil {
		return nil, err
	}
	return trimmed.(*item), nil // trim returns nothing else
}
