// SPDX-License-Identifier: Apache-2.0

package redirection

// Sighting says that a network namespace held certain packet rules at a certain time. It stays true whatever happens to
// the namespace later, so it may be kept over a restart, together with the namespace's key.
type Sighting struct {
	// Generation is the number of the last transaction on the namespace's packet rules then.
	Generation uint32 `json:"generation"`
	// Rules stands for the rules: another text for any others, and for another way to compare them.
	Rules string `json:"rules"`
	// Numbered says that the kernel had given the rules the numbers that it gives to those of a table made at once.
	Numbered bool `json:"numbered,omitempty"`
}
