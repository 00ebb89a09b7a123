// SPDX-License-Identifier: Apache-2.0

package install

import (
	"os"
	"testing"

	"ambientd/tools/netnstest"
)

func TestMain(m *testing.M) { os.Exit(netnstest.Main(m)) }
